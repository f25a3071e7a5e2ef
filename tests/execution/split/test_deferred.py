"""A child whose code is generated late behaves like one with code from the start."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxpart.torch_compat.split_module import split_module


class Layers(nn.Module):
    """A layer, its activation, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the second layer."""
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def _split() -> tuple[GraphModule, GraphModule, Layers]:
    """Return a cut of both layers, its first child, which never ran, and the model."""
    model = Layers()
    traced = symbolic_trace(model)
    split = split_module(traced, None, lambda node: int(node.name == "second"))
    child = split.get_submodule("submod_0")
    assert isinstance(child, GraphModule)
    return split, child, model


X = torch.tensor([[1.0, -2.0]])


def test_hooks_run_once_at_the_first_call() -> None:
    split, child, _ = _split()
    calls: list[str] = []
    child.register_forward_pre_hook(lambda *_: calls.append("before"))
    child.register_forward_hook(lambda *_: calls.append("after"))
    split(X)
    split(X)
    assert calls == ["before", "after"] * 2


def test_the_code_exists_when_it_is_read() -> None:
    assert "self.first(x)" in _split()[1].code
    assert "self.first(x)" in str(_split()[1])


@pytest.mark.parametrize("run_before", [False, True])
def test_copies_and_pickles_compute_the_same(run_before: bool) -> None:
    split, child, model = _split()
    if run_before:
        split(X)
    whole = [copy.deepcopy(split), copy.copy(split), pickle.loads(pickle.dumps(split))]
    assert all(torch.equal(copied(X), model(X)) for copied in whole)
    inner = [copy.deepcopy(child), copy.copy(child), pickle.loads(pickle.dumps(child))]
    assert all(torch.equal(copied(X), torch.relu(model.first(X))) for copied in inner)


def test_a_changed_graph_runs_as_changed() -> None:
    split, child, model = _split()
    assert torch.equal(split(X), model(X))
    output = child.graph.output_node()
    with child.graph.inserting_before(output):
        output.args = (child.graph.call_function(torch.neg, (output.args[0],)),)
    child.recompile()
    assert "neg" in child.code
    assert torch.equal(split(X), model.second(-torch.relu(model.first(X))))


def test_a_split_that_never_ran_can_be_traced_exported_and_compiled() -> None:
    _, child, model = _split()
    assert torch.equal(symbolic_trace(child)(X), torch.relu(model.first(X)))
    split, _, model = _split()
    assert torch.equal(symbolic_trace(split)(X), model(X))
    split, _, model = _split()
    assert torch.equal(torch.export.export(split, (X,)).module()(X), model(X))
    split, _, model = _split()
    torch._dynamo.reset()
    compiled = torch.compile(split, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), model(X))
