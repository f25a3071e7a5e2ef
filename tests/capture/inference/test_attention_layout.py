"""On meta, results of attention have the layout that they have in a run."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxpart.capture.api import capture_graph
from fxpart.capture.calls import storage_key
from fxpart.capture.inference.export import export_program
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.execution.real_step import forward_peak_bytes, step_peak_bytes


def _by_tokens(x: Tensor) -> Tensor:
    return x.view(2, 8, 4, 16).transpose(1, 2)


def _by_heads(x: Tensor) -> Tensor:
    return x.view(2, 4, 8, 16)


def _matrices(x: Tensor) -> Tensor:
    return x.view(2, 64, 8).transpose(1, 2)


class _Attention(nn.Module):
    """Returns attention with heads and tokens swapped, contiguous and as rows of tokens."""

    def __init__(
        self, heads: Callable[[Tensor], Tensor], dropout: float = 0.0, *, masked: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.masked = heads, dropout, masked

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.heads(x)
        mask = x.new_zeros(8, 8) if self.masked else None
        result = functional.scaled_dot_product_attention(
            query, query, query, mask, dropout_p=self.dropout
        )
        swapped = result.transpose(1, 2)
        return swapped, swapped.contiguous(), (swapped * 2).reshape(2, -1)


_CASES = {
    "by tokens": (_Attention(_by_tokens), True),
    "masked": (_Attention(_by_tokens, masked=True), True),
    "by heads": (_Attention(_by_heads), False),
    # Computed by its definition.
    "matrices": (_Attention(_matrices), False),
    "dropout": (_Attention(_by_tokens, 0.5), False),
}


@pytest.mark.parametrize("name", _CASES)
def test_contiguous_copies_as_in_a_run(name: str) -> None:
    module, shares = _CASES[name]
    swapped, contiguous, rows = module(torch.randn(2, 8, 64))
    assert (storage_key(swapped) == storage_key(contiguous)) is shares
    program = export_program(module, (torch.randn(2, 8, 64, device="meta"),))
    results = [node.meta["val"] for node in program.graph.output_node().args[0]]
    assert [r.stride() for r in results] == [r.stride() for r in (swapped, contiguous, rows)]
    assert (storage_key(results[0]) == storage_key(results[1])) is shares


_NEXT: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda y: y.contiguous().view(8, 8, 16),
    "a view of tokens": lambda y: y.transpose(1, 2).view(2, 8, 64),
    "rows of heads": lambda y: y.contiguous().transpose(1, 2).reshape(2, 8, 64),
    "doubled": lambda y: (y * 2).transpose(1, 2).flatten(2),
    "a branch": lambda y: y.flatten() if y.is_contiguous() else y.transpose(1, 2).flatten(),
}


class _Then(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.then = nn.Linear(64, 64), then

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query = _by_tokens(self.project(x))
        result = functional.scaled_dot_product_attention(query, query, query)
        return result, self.then(result)


@pytest.mark.parametrize("name", _NEXT)
def test_calls_on_the_result_see_its_layout(name: str) -> None:
    module, x = _Then(_NEXT[name]), torch.randn(2, 8, 64)
    with torch.no_grad():
        before, after = module(x)
    program = export_program(module.to("meta"), (x.to("meta"),))
    results = [node.meta["val"] for node in program.graph.output_node().args[0]]
    assert [r.shape for r in results] == [before.shape, after.shape]
    assert [r.stride() for r in results] == [before.stride(), after.stride()]
    is_copy = storage_key(before) != storage_key(after)
    assert (storage_key(results[0]) != storage_key(results[1])) is is_copy


@pytest.mark.parametrize("name", _NEXT)
def test_peaks_are_those_of_a_run(name: str) -> None:
    module = _Then(_NEXT[name])
    graph = capture_graph(module.to("meta"), (torch.randn(2, 8, 64, device="meta"),))
    real = _Then(_NEXT[name])
    assert _peak_bytes(graph) == forward_peak_bytes(real, (torch.randn(2, 8, 64),))


class _Unfused(nn.Module):
    """Attention by its definition, since the model allows no fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.project(x).view(2, 128, 4, 16).transpose(1, 2)
        with sdpa_kernel(SDPBackend.MATH):
            result = functional.scaled_dot_product_attention(
                query, query, query, mask, is_causal=mask is None
            )
        projected: Tensor = self.back(result.transpose(1, 2).flatten(2))
        return projected


def test_attention_without_fused_kernels_holds_its_scores() -> None:
    module, x = _Unfused(), torch.randn(2, 128, 64)
    graph = capture_graph(_Unfused().to("meta"), (x.to("meta"),))
    (call,) = (op for op, target in enumerate(graph.targets) if "attention" in target)
    assert graph.targets[call] == "aten._scaled_dot_product_attention_math.default"
    assert graph.flops[call] == 4 * 2 * 4 * 128 * 128 * 16
    assert _peak_bytes(graph) == forward_peak_bytes(module, (x,))
    step_bytes = _peak_bytes(joint_graph(module, (x,)))
    assert 0 <= step_peak_bytes(module, (x,)).peak_bytes - step_bytes <= 4  # of the loss


def test_a_boolean_mask_is_converted_without_fused_kernels() -> None:
    x, mask = torch.randn(2, 128, 64), torch.ones(2, 4, 128, 128).tril().bool()
    graph = capture_graph(_Unfused().to("meta"), (x.to("meta"), mask.to("meta")))
    assert _peak_bytes(graph) == forward_peak_bytes(_Unfused(), (x, mask))


def _peak_bytes(graph: OpGraph) -> int:
    on_one = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0])
