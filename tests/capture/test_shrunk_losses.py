"""Reduced losses that keep the storage of all their terms: captured sizes against torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpart.capture.api import capture_graph
from fxpart.capture.symbolic.api import symbolic_graph
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.capture.training.joint import joint_graph
from fxpart.core.fusion import fused
from fxpart.core.graph import OpGraph

_ROWS, _COLUMNS = 6, 8
_ALL_TERMS = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
_SCALAR = ("l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


class _Loss(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.name, self.options = name, options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return getattr(functional, self.name)(x, y, **self.options)  # type: ignore[no-any-return]


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_COLUMNS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(x * self.weight, y)


class _Unwatched(nn.Module):
    """A loss in a region without gradients, beside a result that has one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            loss = functional.mse_loss(x, y)
        return x + loss


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.full((_ROWS, _COLUMNS), 0.5, dtype=dtype), torch.ones(_ROWS, _COLUMNS, dtype=dtype)


def _stored(graph: OpGraph) -> list[int]:
    """Return the bytes of each storage that an operator of `graph` allocates."""
    made = graph.value_alloc_bytes[graph.value_producer >= 0]
    return sorted(made[made > 0].tolist())


@pytest.mark.parametrize("name", [*_ALL_TERMS, *_SCALAR])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_allocates_what_torch_does(name: str, reduction: str, dtype: torch.dtype) -> None:
    module, (x, y) = _Loss(name, reduction=reduction), _data(dtype)
    graph = capture_graph(module, (x, y))
    (loss,) = graph.value_alloc_bytes[graph.value_is_output]
    assert loss == module(x, y).untyped_storage().nbytes()
    assert (loss > dtype.itemsize) == (name in _ALL_TERMS or reduction == "none")


def test_terms_of_broadcast_and_mixed_operands_are_counted() -> None:
    x, y = torch.ones(_ROWS, 1, dtype=torch.float64), torch.ones(_COLUMNS)
    module = _Loss("smooth_l1_loss")
    graph = capture_graph(module.to("meta"), (x.to("meta"), y.to("meta")))
    (loss,) = graph.value_alloc_bytes[graph.value_is_output]
    with pytest.warns(UserWarning, match="different to the input size"):
        assert loss == module(x, y).untyped_storage().nbytes() == _ROWS * _COLUMNS * 8


def test_a_loss_inside_a_region_keeps_its_terms() -> None:
    x, y = _data()
    graph = capture_graph(_Unwatched(), (x.requires_grad_(), y))
    assert _stored(graph) == [_ROWS * _COLUMNS * 4] * 2


def test_the_terms_grow_with_the_batch() -> None:
    module, dims = _Weighted(), [SymbolicDim(leaf, 0, "batch") for leaf in (0, 1)]
    symbolic = symbolic_graph(module, _data(), dims=dims, phase="training")
    stored = _stored(symbolic.at(batch=32))
    assert stored == _stored(joint_graph(module, (torch.ones(32, _COLUMNS),) * 2))
    # The product, the terms, the gradient of the product, and its product with x.
    assert stored.count(32 * _COLUMNS * 4) == 4


def test_a_compiled_loss_stores_only_its_result() -> None:
    graph = capture_graph(_Loss("mse_loss"), _data())
    assert _stored(graph) == [_ROWS * _COLUMNS * 4]
    assert _stored(fused(graph)) == [4]


def test_both_levels_agree() -> None:
    data = tuple(tensor.to("meta") for tensor in _data())
    by_module = capture_graph(_Loss("mse_loss"), data, level="module")
    by_operator = capture_graph(_Loss("mse_loss"), data)
    assert _stored(by_module) == _stored(by_operator) == [_ROWS * _COLUMNS * 4]
