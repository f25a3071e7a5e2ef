"""Values that may share memory: views and pieces of one tensor do, items of a new tuple do not."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxpart.errors import CycleError
from fxpart.execution.split.effects import SharedMemory, storages
from fxpart.execution.split.write_order import write_edges
from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import call_nodes, same

MAKERS: dict[str, Callable[[Graph, Node], Node]] = {
    "overload": lambda g, x: g.call_function(torch.ops.aten.topk.default, (x, 2)),
    "function": lambda g, x: g.call_function(torch.topk, (x, 2)),
    "method": lambda g, x: g.call_method("topk", (x, 2)),
}
"""Functions that return a tuple of two new tensors."""
PIECES: dict[str, Callable[[Graph, Node], Node]] = {
    "overload": lambda g, x: g.call_function(torch.ops.aten.chunk.default, (x, 2)),
    "function": lambda g, x: g.call_function(torch.chunk, (x, 2)),
    "method": lambda g, x: g.call_method("unbind", (x,)),
}
"""Functions that return a tuple of two pieces of their input."""


def _item(graph: Graph, whole: Node, place: int) -> Node:
    return graph.call_function(operator.getitem, (whole, place))


def _written_item(make: Callable[[Graph, Node], Node]) -> GraphModule:
    """Return a graph with a tuple, its items, a write to the first, and a reader of the second."""
    graph = Graph()
    both = make(graph, graph.placeholder("x"))
    first, second = _item(graph, both, 0), _item(graph, both, 1)
    written = graph.call_method("mul_", (first, 2))
    graph.output((written, graph.call_method("add", (second, 1))))
    return GraphModule(nn.Module(), graph)


def _edges(module: GraphModule) -> dict[tuple[int, int], str]:
    ops = call_nodes(module)
    return write_edges(module, ops, {op: place for place, op in enumerate(ops)})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_write_into_one_item_of_a_new_tuple(make: Callable[[Graph, Node], Node]) -> None:
    module = _written_item(make)
    # Neither the tuple, nor its other item, nor the reader of that.
    assert _edges(module) == {}
    ids = dict(zip(call_nodes(module), [0, 0, 1, 0, 1], strict=True))
    x = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])
    assert same(split_module(module, None, ids.__getitem__)(x), module(x))


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_a_write_into_one_piece_of_a_tensor(make: Callable[[Graph, Node], Node]) -> None:
    # Treated as one memory even if pieces do not overlap: not all views know that.
    assert _edges(_written_item(make)) == dict.fromkeys([(0, 3), (1, 3), (2, 3), (3, 4)], "getitem")


def test_the_same_item_taken_twice_is_one_tensor() -> None:
    graph = Graph()
    both = graph.call_method("topk", (graph.placeholder("x"), 2))
    first, again = _item(graph, both, 0), _item(graph, both, 0)
    before = graph.call_method("neg", (again,))
    graph.call_method("mul_", (first, 2))
    graph.output((before, graph.call_method("neg", (again,))))
    module = GraphModule(nn.Module(), graph)
    assert _edges(module) == {(3, 4): "getitem", (4, 5): "getitem"}
    ids = dict(zip(call_nodes(module), [0, 0, 0, 1, 0, 1], strict=True))
    with pytest.raises(CycleError, match="getitem is written in place"):
        split_module(module, None, ids.__getitem__)


@pytest.mark.parametrize("place", [-2, slice(0, 1), True])
def test_items_at_other_indices_share_memory(place: int | slice) -> None:
    graph = Graph()
    both = graph.call_method("clone", (graph.placeholder("x"),))
    first = _item(graph, both, 0)
    graph.call_method("neg", (graph.call_function(operator.getitem, (both, place)),))
    graph.output(graph.call_method("mul_", (first, 2)))
    # The other view is read before the write.
    assert (3, 4) in _edges(GraphModule(nn.Module(), graph))


def test_a_tuple_used_as_a_whole_is_one_memory() -> None:
    graph = Graph()
    both = graph.call_method("sort", (graph.placeholder("x"),))
    first = _item(graph, both, 0)
    graph.call_function(torch.stack, (both,))
    graph.output(graph.call_method("mul_", (first, 2)))
    assert (2, 3) in _edges(GraphModule(nn.Module(), graph))


def test_items_whose_examples_share_a_storage_are_one_memory() -> None:
    def made(value: tuple[Tensor, Tensor]) -> dict[tuple[int, int], str]:
        module = _written_item(MAKERS["function"])
        call_nodes(module)[0].meta["val"] = value
        return _edges(module)

    base = torch.ones(4)
    assert made((base.clone(), base)) == {}
    assert made((base[:2], base[2:])) != {}


def test_storages_of_nested_values() -> None:
    base = torch.ones(4)
    sparse = torch.ones(2, 2).to_sparse()
    values = storages("x", {"a": [base, base[1:], 3], "b": (None, sparse, sparse)})
    assert values[0] == values[1]
    assert values[2] == values[3] == ("x", id(sparse))
    assert len(set(values)) == 2


def test_nodes_with_one_tensor_are_one() -> None:
    graph, memory, tensor = Graph(), SharedMemory(), torch.ones(2)
    a, b, c = (graph.placeholder(name) for name in "abc")
    for node, value in ((a, tensor), (b, tensor.view(1, 2)), (c, tensor.clone())):
        memory.hold(node, "weight", value)
    assert memory.root(a) == memory.root(b) != memory.root(c)
    # A new object for the same storage changes nothing.
    memory.hold(c, "weight", tensor)
    memory.join(a, c)
    assert memory.root(c) == memory.root(b)
