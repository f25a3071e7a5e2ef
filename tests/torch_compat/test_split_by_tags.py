"""`split_by_tags`: known answers, agreement with torch's, and refusals."""

import random
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.passes.split_utils import split_by_tags as torch_tags

from fxpart.errors import CycleError, SpecError
from fxpart.torch_compat.split_module import split_by_tags
from tests.execution.split.random_graphs import call_nodes, inputs, random_graph, same

_Both = tuple[GraphModule, dict[str, str]]


class Model(nn.Module):
    """A nested layer and a parameter used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, bias: float = 1.0) -> Tensor:
        """Return the result of the last operator."""
        a = self.block(x) * self.scale
        out: Tensor = (a + bias) * self.scale
        return out


def _tagged(*tags: str) -> GraphModule:
    traced = symbolic_trace(Model())
    for node, tag in zip(call_nodes(traced), tags, strict=True):
        node.tag = tag
    return traced


def _child(module: GraphModule, name: str) -> GraphModule:
    submodule = module.get_submodule(name)
    assert isinstance(submodule, GraphModule)
    return submodule


def test_children_in_the_order_of_tags_with_their_own_attributes() -> None:
    traced = _tagged("a", "a", "b", "b")
    split, paths = split_by_tags(traced, ["a", "b"], return_fqn_mapping=True)
    assert [n.name for n in split.graph.nodes] == ["x", "bias", "a", "b", "output"]
    assert [str(n) for n in _child(split, "b").graph.nodes] == [
        "mul", "bias", "scale", "add", "mul_1", "output",
    ]  # fmt: skip
    assert paths == {"block.0": "a.block.0", "scale": "b.scale"}
    assert split.get_parameter("a.scale") is split.get_parameter("b.scale") is traced.scale
    assert {n.tag for n in _child(split, "a").graph.nodes if n.op.startswith("call")} == {"a"}
    x = torch.randn(2, 4)
    assert torch.equal(split(x), traced(x))
    assert torch.equal(split(x, bias=3.0), traced(x, bias=3.0))
    # torch's version drops the default.
    with pytest.raises(TypeError, match="bias"):
        torch_tags(traced, ["a", "b"])(x)  # type: ignore[operator]


def test_a_tag_without_operators_and_results_as_tuples() -> None:
    traced = _tagged("a", "a", "b", "b")
    split = split_by_tags(traced, ["a", "none", "b"], return_tuple=True)
    assert _child(split, "none")() == ()
    x = torch.randn(2, 4)
    assert isinstance(_child(split, "a")(x), tuple)
    assert torch.equal(split(x), traced(x))


def test_the_class_of_the_result_can_be_chosen() -> None:
    class Mine(GraphModule):
        pass

    split = split_by_tags(_tagged("a", "a", "b", "b"), ["a", "b"], GraphModuleCls=Mine)
    assert isinstance(split, Mine)


def test_nested_inputs_and_outputs_survive() -> None:
    class Nested(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"out": (x["a"] + 1) * x["b"]}

    args = ({"a": torch.ones(2), "b": torch.full((2,), 3.0)},)
    module = torch.export.export(Nested(), args).module(check_guards=False)
    for node, tag in zip(call_nodes(module), ("first", "second"), strict=True):
        node.tag = tag
    split = split_by_tags(module, ["first", "second"])
    assert same(split(*args), module(*args))


def _by_kind(module: GraphModule) -> tuple[list[object], list[object]]:
    """Return inputs and operators; torch adds inputs in between, at their first use."""
    rows = [(n.op, n.name, n.target, str(n.args)) for n in module.graph.nodes]
    return (
        [row for row in rows if row[0] == "placeholder"],
        [row for row in rows if row[0].startswith("call")],
    )


@pytest.mark.parametrize("as_tuple", [False, True])
def test_random_graphs_are_split_as_by_torch(as_tuple: bool) -> None:
    several = 0
    for seed in range(60):
        module = random_graph(seed)
        ops, rng = call_nodes(module), random.Random(seed)
        tags = ["red", "green", "blue"]
        for node, index in zip(ops, sorted(rng.randrange(3) for _ in ops), strict=True):
            node.tag = tags[index]
        ours, our_paths = split_by_tags(module, tags, True, as_tuple)
        theirs, their_paths = cast("_Both", torch_tags(module, tags, True, as_tuple))
        assert our_paths == their_paths
        for tag in tags:
            a, b = _child(ours, tag), _child(theirs, tag)
            assert _by_kind(a) == _by_kind(b)
            assert str(a.graph.output_node().args) == str(b.graph.output_node().args)
            assert a.state_dict().keys() == b.state_dict().keys()
        x, y = inputs(seed)
        expected = module(x, y, 2.0)
        assert same(ours(x, y, 2.0), expected)
        assert same(theirs(x, y, 2.0), expected)
        several += len({getattr(node, "tag") for node in ops}) > 1  # noqa: B009
    assert several >= 30


def test_refusals() -> None:
    traced = _tagged("a", "a", "b", "b")
    with pytest.raises(CycleError, match="add is tagged b and reads mul, tagged a, which comes"):
        split_by_tags(traced, ["b", "a"])
    with pytest.raises(SpecError, match="block_0 is tagged 'a', which is not among tags; there"):
        split_by_tags(traced, ["b"])
    with pytest.raises(SpecError, match="give each once"):
        split_by_tags(traced, ["a", "b", "a"])
    with pytest.raises(SpecError, match="without dots"):
        split_by_tags(traced, ["a", "b.c"])
    with pytest.raises(SpecError, match=r"block_0 has no tag; set node\.tag"):
        split_by_tags(symbolic_trace(Model()), ["a"])
