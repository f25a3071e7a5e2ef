"""A backward with weight gradients last: by hand, and otherwise the same step."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.training.joint import JointCapture, joint_capture
from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.phases import StepOptions
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate, peak_bytes
from fxpart.cost.tables import memory_tables
from tests.sketch import devices, problem

LATE = StepOptions(backward_order="late_weight_gradients")


def _both(module: nn.Module, *args: Tensor) -> tuple[JointCapture, JointCapture]:
    return joint_capture(module, args), joint_capture(module, args, None, LATE)


def _layers() -> nn.Module:
    """Return three layers with weights of 64 bytes; with 8 rows, activations have 128."""
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


def _products(graph: OpGraph) -> list[str]:
    return [
        f"{graph.modules[op]}:{graph.names[op]}"
        for op in range(graph.first_backward, graph.n_ops)
        if graph.targets[op] == "aten.mm.default"
    ]


def test_the_order_by_hand() -> None:
    usual, late = _both(_layers(), torch.ones(8, 4))
    # mm_3 to mm_7 in autograd's order: for each layer its weight gradient, then its input gradient.
    assert _products(usual.graph) == ["2:mm_3", "2:mm_4", "1:mm_5", "1:mm_6", "0:mm_7"]
    assert _products(late.graph) == ["2:mm_4", "1:mm_6", "2:mm_3", "1:mm_5", "0:mm_7"]
    assert late.gradients == usual.gradients


def test_memory_by_hand() -> None:
    peaks = [
        int(peak_bytes(memory_tables(g), np.zeros(g.n_ops, dtype=np.int64), 1)[0])
        for g in (step.graph for step in _both(_layers(), torch.ones(8, 4)))
    ]
    # Weights, the input, the loss; two activations, the gradient of the last result, that of the
    # last layer's weight, and that of its input, which is computed while all these are live.
    assert peaks[0] == 3 * 64 + 128 + 4 + 2 * 128 + 128 + 64 + 128
    # The gradients of both inputs are live before the first of a weight.
    assert peaks[1] == 3 * 64 + 128 + 4 + 2 * 128 + 128 + 64 + 2 * 128


def test_latency_by_hand() -> None:
    seconds = []
    for step in _both(_layers(), torch.ones(8, 4)):
        graph = replace(step.graph, moved_bytes=np.zeros(step.graph.n_ops, dtype=np.int64))
        this = problem(graph, devices(*[10**6] * 3, rate=2 * 8 * 4 * 4, link=Link(1e12)))
        layer = np.array([int(path or 2) for path in graph.modules])
        placed = partition_by_device(graph, layer[graph.group])
        seconds.append(round(evaluate(this, placed).latency_s, 6))
    # 3 forward, then 2 + 2 + 1; or the chain of 2 and the last layer's, others in parallel.
    assert seconds == [8, 6]


class _Tied(nn.Module):
    """A weight that is used twice, a residual, and in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index)
        y = self.inner(x).relu_()
        z = self.norm(x + y)
        z[0].mul_(2)
        logits: Tensor = z @ self.table.weight.T
        return logits


class _CastWeights(nn.Module):
    """Float32 weights that compute in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight.bfloat16())
        return x.float()


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "layers": (_layers, lambda: torch.randn(8, 4), True),
    "tied": (_Tied, lambda: torch.arange(7), True),
    "cast": (_CastWeights, lambda: torch.randn(3, 4, dtype=torch.bfloat16), True),
    # Calls that compute both gradients, and one call for the whole model, leave nothing to move.
    "convolutions": (_convolutions, lambda: torch.randn(2, 2, 8, 8), False),
    "recurrent": (lambda: nn.LSTM(4, 4, 2), lambda: torch.randn(3, 2, 4), False),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        lambda: torch.randn(3, 2, 8),
        True,
    ),
}
"""A module, an input, and whether the order differs from autograd's."""


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_the_same_in_another_topological_order(name: str) -> None:
    build, draw, differs = CASES[name]
    module, x = build(), draw()
    usual, late = _both(module, x)
    assert sorted(late.graph.names) == sorted(usual.graph.names)
    first = usual.graph.first_backward
    assert late.graph.names[:first] == usual.graph.names[:first]
    # Each operator has the same reads; the arrays have a topological order, or are refused.
    reads = [
        {node.name: (str(node.target), str(node.args), str(node.kwargs)) for node in nodes}
        for nodes in (step.program.graph.nodes for step in (usual, late))
    ]
    assert reads[0] == reads[1]
    # In its own order, both for those that stay and for the last.
    place = {name: op for op, name in enumerate(usual.graph.names)}
    order = [place[name] for name in late.graph.names[first:]]
    steps_back = [op for op in range(1, len(order)) if order[op] < order[op - 1]]
    assert len(steps_back) == differs
    # The results are bit-identical.
    results = [_computed(step, module, x) for step in (usual, late)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _computed(step: JointCapture, module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = [named.get(str(spec.target), x) for spec in step.program.graph_signature.input_specs]
    values = [value.detach().clone() for value in values]
    with torch.no_grad():
        return tuple(step.program.graph_module(*values))


def test_items_stay_with_a_call_that_computes_both_gradients() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    _, late = _both(module, torch.randn(3, 4))
    call = late.graph.names.index("native_layer_norm_backward")
    assert late.graph.targets[call + 1] == "getitem"
    targets = np.array(late.graph.targets)
    items = np.flatnonzero(targets == "getitem")
    backward = items[items > call]
    assert backward.tolist() == [call + 1, call + 2, call + 3]


def test_a_recomputed_block_is_recomputed_at_the_same_place() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.two(self.one(x).relu())
            return result

    module, x = nn.Sequential(Block(), Block()), torch.randn(5, 4)
    usual = joint_capture(module, (x,), None, StepOptions("block"))
    late = joint_capture(module, (x,), None, replace(LATE, checkpointing="block"))
    again = [n for n in usual.graph.names if n.endswith("_again")]
    assert again
    assert [n for n in late.graph.names if n.endswith("_again")] == again
    results = [_computed(step, module, x) for step in (usual, late)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
