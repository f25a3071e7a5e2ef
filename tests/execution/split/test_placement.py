"""Captured models cut by plans: bit-identical results and gradients."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxpart.capture.api import capture
from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.errors import SpecError
from fxpart.execution.split.placement import split_by_assignment
from tests.capture.small_specs import GPT2, LLAMA
from tests.execution.split.random_graphs import same


def _real(spec: ModelSpec) -> nn.Module:
    """Return the model of a spec with random weights."""
    import transformers

    cls = getattr(transformers, str(spec.architecture))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls._from_config(cls.config_class(**spec.config, use_cache=False))
    assert isinstance(model, nn.Module)
    return model.eval()


@pytest.fixture(scope="module", params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def captured(request: pytest.FixtureRequest) -> tuple[GraphModule, OpGraph, Tensor]:
    """Return a captured small language model, its arrays, and tokens."""
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(0))
    program = export_program(_real(request.param), (ids,), None)
    return program.module(), op_graph(program), ids


def _devices(graph: OpGraph, rng: np.random.Generator, contiguous: bool) -> np.ndarray[Any, Any]:
    """Return random devices, the same for operators that must stay together."""
    devices = rng.integers(0, 4, graph.n_ops)
    if contiguous:
        devices = np.sort(devices)
    return devices[graph.group].astype(np.int64)


def _tensors(result: object) -> list[Tensor]:
    values = result.values() if isinstance(result, Mapping) else [result]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_language_model_computes_the_same(
    captured: tuple[GraphModule, OpGraph, Tensor], contiguous: bool
) -> None:
    module, graph, ids = captured
    for seed in range(2):
        plan = partition_by_device(graph, _devices(graph, np.random.default_rng(seed), contiguous))
        split = split_by_assignment(module, graph, plan)
        calls = [n.target for n in split.graph.nodes if n.op == "call_module"]
        expected = [f"submod_{part}" for part in range(plan.n_partitions)]
        assert calls == ["_guards_fn", *expected]
        with torch.no_grad():
            result, whole = split(ids), module(ids)
        assert type(result) is type(whole)
        assert len(_tensors(whole)) == 1
        assert same(_tensors(result), _tensors(whole))
        assert [n.name for n in split.graph.find_nodes(op="placeholder")] == [
            n.name for n in module.graph.find_nodes(op="placeholder")
        ]


def test_gradients_of_tied_weights_are_equal(
    captured: tuple[GraphModule, OpGraph, Tensor],
) -> None:
    module, graph, ids = captured
    plan = partition_by_device(graph, _devices(graph, np.random.default_rng(1), contiguous=True))
    split = split_by_assignment(module, graph, plan)
    assert {id(p) for p in split.parameters()} == {id(p) for p in module.parameters()}
    grads = []
    with torch.enable_grad():
        for model in (module, split):
            module.zero_grad()
            _tensors(model(ids))[0].float().mean().backward()  # type: ignore[no-untyped-call]
            grads.append([p.grad for p in module.parameters()])
    assert any(g is not None and g.abs().sum() > 0 for g in grads[0])
    assert same(*grads)


class Counting(nn.Module):
    """Writes to its own buffer, and reads it before and after."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the values read before and after the write."""
        before = x * self.count
        self.count.add_(1.0)
        return {"before": before, "after": self.norm(x + self.count)}


# Torch's decomposition copies a call that torch itself deprecates.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True])
def test_buffers_that_are_written_to(decomposed: bool) -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(Counting(), (x,))
    if decomposed:
        program = program.run_decompositions({})
    module, graph = program.module(), op_graph(program)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = module(x)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    assert not same(state, after)
    for seed in range(5):
        module.load_state_dict(state)
        rng = np.random.default_rng(seed)
        plan = partition_by_device(graph, _devices(graph, rng, contiguous=True))
        split = split_by_assignment(module, graph, plan)
        assert same(split(x), expected)
        assert same(dict(module.state_dict()), after)


def test_a_traced_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    captured = capture(model, (x,), level="module")
    plan = Assignment(np.array([0, 0, 1]), ((0,), (1,)))
    split = split_by_assignment(captured.graph_module, captured.graph, plan)
    assert list(dict(split.named_children())) == ["submod_0", "submod_1"]
    assert torch.equal(split(x), model(x))


def test_graphs_of_another_capture_are_refused() -> None:
    x = torch.randn(2, 3)
    captured = capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (x,))
    other = capture(nn.Linear(3, 3), (x,))
    plan = Assignment(np.array([0, 1]), ((0,), (1,)))
    with pytest.raises(SpecError, match="the assignment places 2 operators, the model has 1"):
        split_by_assignment(other.graph_module, other.graph, plan)
    with pytest.raises(SpecError, match="places operator relu, which the module does not have"):
        split_by_assignment(other.graph_module, captured.graph, plan)
    renamed = dataclasses.replace(captured.graph, names=("linear", "rely"))
    with pytest.raises(SpecError, match=r"operator rely, .* nearest: relu"):
        split_by_assignment(captured.graph_module, renamed, plan)
