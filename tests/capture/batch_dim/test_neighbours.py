"""Operators that combine neighbours: on two halves of a batch, they are right or state a reason.

The graphs have static sizes, where another batch size is easiest to get wrong.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fxpart.capture.batch_dim.analyze import BatchDimReport, analyze_batch_dims
from fxpart.capture.batch_dim.layout import Layout
from tests.capture.batch_dim.lockstep import disagreements
from tests.capture.batch_dim.traced import Calls, answered

BATCH = 12
_ONE_ROW = torch.zeros(1, 8, dtype=torch.int64)
_ONE_COLUMN = torch.ones(4, 1, dtype=torch.int64)


def _played(function: Callable[[Tensor], Tensor], *more: int) -> Layout:
    """Return the layout of the result for (12, 8) and `more`, checking every value on halves."""
    x = torch.randn(BATCH, 8, *more, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Calls(function), (x,), strict=False)
    signature = program.graph_signature.input_specs
    names = [spec.arg.name for spec in signature]
    inputs = [program.constants.get(str(spec.target), x) for spec in signature]
    dims = [0 if tensor is x else None for tensor in inputs]
    batch_dims = {name: 0 for name, dim in zip(names, dims, strict=True) if dim == 0}
    report: BatchDimReport = analyze_batch_dims(program.graph_module.graph, batch_dims)
    assert disagreements(program.graph_module, report, inputs, dims) == []
    return report.of(report.outputs[0]).layouts[0]


MARKED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (torch.tril, "compares positions within the batch"),
    (lambda x: torch.triu(x, 1), "compares positions within the batch"),
    (lambda x: torch.tril(x.t()), "compares positions within the batch"),
    (lambda x: functional.pad(x, (0, 0, 1, 0)), "adds elements along the batch"),
    (lambda x: functional.pad(x.t(), (0, -1)), "adds elements along the batch"),
    (lambda x: functional.pad(x.t()[None], (1, 1), mode="reflect"), "adds elements along"),
    (lambda x: x.gather(0, _ONE_ROW), "takes some examples"),
    (lambda x: x.gather(1, _ONE_COLUMN), "takes some examples"),
    (lambda x: x.scatter(0, _ONE_ROW, 1.0), "takes some examples"),
    (lambda x: functional.avg_pool1d(x.t()[None], 2), "goes along the batch"),
    (lambda x: functional.max_pool1d(x.t()[None], 5, 1), "goes along the batch"),
    (lambda x: functional.conv1d(x.t()[None], torch.ones(2, 8, 3)), "goes along the batch"),
    (lambda x: functional.group_norm(x.t(), 3), "goes along the batch"),
    (lambda x: functional.scaled_dot_product_attention(x, x, x), "goes along the batch"),
    (lambda x: x.reshape(2, -1), "mixes the batch with other dimensions"),
    (lambda x: x.t().reshape(8, 3, -1), "mixes the batch with other dimensions"),
]


@pytest.mark.parametrize(("function", "reason"), MARKED)
def test_operators_that_mix_neighbouring_examples_are_marked(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    assert reason in _played(function).differs


RIGHT: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (torch.tril, 0),
    (lambda x: functional.pad(x, (1, 0, 2, 0)), 0),
    (lambda x: functional.pad(x.mean(0), (1, 1), value=3.0), -2),
    (lambda x: functional.pad(x.sum(0), (1, 1), value=3.0), -1),
    (lambda x: functional.pad(x, (1, 1), mode="reflect"), 0),
    (lambda x: x.gather(1, torch.ones_like(x, dtype=torch.int64)), 0),
    (lambda x: functional.avg_pool1d(x, 2), 0),
    (lambda x: functional.max_pool1d(x.transpose(0, 1), 2), 1),
    (lambda x: functional.layer_norm(x, (8, 6)), 0),
    (lambda x: functional.group_norm(x, 2), 0),
    (lambda x: functional.scaled_dot_product_attention(x, x, x), 0),
    (lambda x: x.reshape(-1, 6), 0),
    (lambda x: x.reshape(-1, 48), 0),
    (lambda x: x.sum(0).tril(), -2),
]


@pytest.mark.parametrize(("function", "dim"), RIGHT)
def test_operators_within_an_example_are_not_marked(
    function: Callable[[Tensor], Tensor], dim: int
) -> None:
    played = _played(function, 6)
    assert (played.dim, played.differs) == (dim, "")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: functional.layer_norm(x.t(), (BATCH,)), "goes along the batch"),
        (lambda x: x.reshape(2, 48), "mixes the batch with other dimensions"),
        (lambda x: x.reshape(BATCH * 4, -1), ""),
        (lambda x: x.reshape(3, 4, 8), ""),
    ],
)
def test_graphs_of_one_batch_size_alone(function: Callable[[Tensor], Tensor], reason: str) -> None:
    (layout,), _ = answered(function, torch.empty(BATCH, 8))
    assert layout.dim >= 0
    assert layout.differs.startswith(reason)
    assert bool(layout.differs) is bool(reason)


def test_groups_of_a_symbolic_batch_are_equal_on_each_process() -> None:
    graph = make_fx(lambda x: x.reshape(2, -1), tracing_mode="symbolic")(torch.empty(4, 8)).graph
    report = analyze_batch_dims(graph, {graph.find_nodes(op="placeholder")[0].name: 0})
    assert "mixes the batch" in report.of(report.outputs[0]).layouts[0].differs


def test_the_gradient_of_a_slice_repeats_the_batch_like_the_sliced_value() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        twice = torch.cat([x, x])
        return torch.autograd.grad(twice[: x.shape[0]].sin().sum(), [twice])

    (layout,), _ = answered(step, torch.empty(6, 5, requires_grad=True))
    assert (layout.dim, layout.outer, layout.differs) == (0, 2, "")
