"""Known answers, and each property that must survive a cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import by_name, call_nodes, same


def child(module: GraphModule, name: str) -> GraphModule:
    """Return a child that is a graph module."""
    submodule = module.get_submodule(name)
    assert isinstance(submodule, GraphModule)
    return submodule


class Small(nn.Module):
    """Two linear layers that share a weight, one in another module, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4))
        self.body[0].weight = self.first.weight
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, factor: float = 2.0) -> dict[str, Tensor]:
        """Return two results."""
        a = self.first(x + self.shift)
        b = self.body(a) * factor
        return {"a": a, "b": b + self.shift}


SMALL_IDS = {"add": 0, "first": 0, "body_0": 1, "mul": 1, "add_1": 1}


def test_a_cut_by_hand() -> None:
    traced = symbolic_trace(Small())
    names: dict[str, str] = {}
    split = split_module(traced, None, by_name(**SMALL_IDS), names)
    lines = [line.partition(";")[0].strip() for line in split.code.strip().splitlines()]
    assert lines == [
        "def forward(self, x : torch.Tensor, factor : float = 2.0):",
        "shift = self.shift",
        "submod_0 = self.submod_0(x, shift)",
        "submod_1 = self.submod_1(submod_0, factor, shift)",
        "return {'a': submod_0, 'b': submod_1}",
    ]
    assert [n.name for n in child(split, "submod_1").graph.nodes] == [
        "first", "factor", "shift", "body_0", "mul", "add", "output",
    ]  # fmt: skip
    assert names == {"submod_0.first": "first", "submod_1.body_0": "body.0"}
    assert split.meta["partition_names"] == {"submod_0", "submod_1"}
    x = torch.randn(2, 4)
    assert same(split(x), traced(x))
    assert same(split(x, factor=3.0), traced(x, factor=3.0))


def test_tied_weights_stay_tied_and_gradients_are_equal() -> None:
    model = Small()
    traced = symbolic_trace(model)
    split = split_module(traced, None, by_name(**SMALL_IDS))
    assert split.get_parameter("submod_0.first.weight") is model.first.weight
    assert split.get_parameter("submod_1.body_0.weight") is model.first.weight
    assert split.get_parameter("shift") is model.shift
    x, grads = torch.randn(2, 4), []
    for module in (traced, split):
        model.zero_grad()
        module(x)["b"].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 4
    assert same(*grads)


def test_names_are_kept_or_numbered() -> None:
    traced = symbolic_trace(Small())
    split = split_module(
        traced, None, by_name(**SMALL_IDS), keep_original_node_name=True,
        keep_original_input_name=False, partition_affix="pp", tuple_return=True,
    )  # fmt: skip
    last = child(split, "submod_pp_1")
    assert [n.name for n in last.graph.nodes] == [
        "arg_0", "arg_1", "arg_2", "body_0", "mul", "add_1", "output",
    ]  # fmt: skip
    (result,) = last(torch.zeros(1, 4), 1.0, torch.zeros(4))
    assert result.shape == (1, 4)
    x = torch.randn(2, 4)
    assert same(split(x), traced(x))


def test_metadata_is_kept() -> None:
    traced = symbolic_trace(Small())
    for node in traced.graph.nodes:
        node.meta["was"] = node.name
    split = split_module(traced, None, by_name(**SMALL_IDS))
    top = {n.name: n.meta.get("was") for n in split.graph.nodes}
    assert top["x"] == "x"
    assert top["shift"] == "shift"
    assert top["output"] == "output"
    inside = [n.meta.get("was") for n in child(split, "submod_1").graph.nodes]
    assert inside == ["first", "factor", "shift", "body_0", "mul", "add_1", None]
    # The copies are independent of the original.
    next(iter(split.graph.nodes)).meta["was"] = "other"
    assert next(iter(traced.graph.nodes)).meta["was"] == "x"


def test_a_value_used_by_several_partitions_is_passed_once() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    negated = graph.call_function(torch.neg, (x,))
    twice = graph.call_function(torch.add, (negated, negated))
    graph.output((graph.call_function(torch.mul, (negated, twice)), negated))
    module = GraphModule(nn.Module(), graph)
    split = split_module(module, None, by_name(neg=0, add=1, mul=2))
    calls = {n.name: [str(a) for a in n.args] for n in split.graph.nodes if n.op == "call_module"}
    assert calls == {
        "submod_0": ["x"],
        "submod_1": ["submod_0"],
        "submod_2": ["submod_0", "submod_1"],
    }


def test_unused_operators_are_kept() -> None:
    traced = symbolic_trace(Small())
    with traced.graph.inserting_before(traced.graph.output_node()):
        unused = traced.graph.call_function(torch.neg, (next(iter(traced.graph.nodes)),))
    split = split_module(traced, None, by_name(**SMALL_IDS, **{unused.name: 7}))
    assert [n.op for n in child(split, "submod_7").graph.nodes] == [
        "placeholder", "call_function", "output",
    ]  # fmt: skip
    assert child(split, "submod_7")(torch.ones(1)) == ()


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_without_operators(keep: bool) -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor, y: int = 3) -> tuple[Tensor, int, Tensor]:
            return x, y, self.held

    traced = symbolic_trace(Nothing())
    split = split_module(traced, None, lambda _: 0, keep_original_order=keep)
    assert list(split.children()) == []
    x = torch.randn(2)
    assert same(split(x), traced(x))


def test_the_callback_is_asked_once_for_each_operator_in_graph_order() -> None:
    traced, names = symbolic_trace(Small()), list[str]()

    def count(node: Node) -> int:
        names.append(node.name)
        return len(names)

    split_module(traced, None, count)
    assert names == [node.name for node in call_nodes(traced)]


def test_inputs_can_still_be_given_by_name() -> None:
    class Named(nn.Module):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - a name that nodes cannot have
            return -input

    traced, x = symbolic_trace(Named()), torch.randn(2)
    ours = split_module(traced, None, lambda _: 0, keep_original_node_name=True)
    assert torch.equal(ours(input=x), traced(input=x))
    assert [n.name for n in ours.graph.find_nodes(op="placeholder")] == ["input_1"]
    by_torch = torch_split(traced, traced, lambda _: 0, keep_original_node_name=True)
    with pytest.raises(TypeError, match="input"):
        by_torch(input=x)


def test_the_mode_of_the_module_is_kept() -> None:
    traced = symbolic_trace(Small()).eval()
    split = split_module(traced, None, by_name(**SMALL_IDS))
    assert not any(part.training for part in split.modules())


def test_two_paths_that_read_the_same_without_dots_are_two_modules() -> None:
    model = nn.Module()
    model.a, model.a_b = nn.Module(), nn.Linear(2, 2)
    model.a.b = nn.Linear(2, 2)
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("a_b", (graph.call_module("a.b", (x,)),)))
    module = GraphModule(model, graph)
    names: dict[str, str] = {}
    split = split_module(module, None, lambda _: 0, names)
    assert names == {"submod_0.a_b": "a.b", "submod_0.a_b_1": "a_b"}
    x_value = torch.randn(3, 2)
    assert torch.equal(split(x_value), module(x_value))
    assert not torch.equal(torch_split(module, module, lambda _: 0)(x_value), module(x_value))
