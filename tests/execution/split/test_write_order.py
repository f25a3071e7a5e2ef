"""In-place writes: partitions keep the graph order around them, or the cut is refused."""

import operator
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.errors import CycleError
from fxpart.execution.split.write_order import write_edges
from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import call_nodes, same


def _numbered(module: GraphModule, ids: list[int]) -> Callable[[Node], int]:
    part_of = dict(zip(call_nodes(module), ids, strict=True))
    return part_of.__getitem__


def _graph(write: Callable[[Graph, Node], object]) -> GraphModule:
    """Return a copy of x, a reader of it, a write to it, and another reader of the old name."""
    graph = Graph()
    x = graph.placeholder("x")
    copy = graph.call_method("clone", (x,))
    before = graph.call_function(torch.neg, (copy,))
    write(graph, copy)
    after = graph.call_function(torch.neg, (copy,))
    graph.output((before, after))
    return GraphModule(nn.Module(), graph)


WRITES: dict[str, Callable[[Graph, Node], object]] = {
    "method": lambda g, t: g.call_method("add_", (t, 1.0)),
    "overload": lambda g, t: g.call_function(torch.ops.aten.add_.Tensor, (t, 1.0)),
    "function": lambda g, t: g.call_function(torch.relu_, (t,)),
    "operator": lambda g, t: g.call_function(operator.imul, (t, 3.0)),
    "item": lambda g, t: g.call_function(operator.setitem, (t, 0, 5.0)),
    "out": lambda g, t: g.call_function(torch.cos, (t,), {"out": t}),
    "switch": lambda g, t: g.call_function(nn.functional.relu, (t,), {"inplace": True}),
    "place": lambda g, t: g.call_function(nn.functional.relu, (t, True)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_readers_and_a_write_run_in_graph_order(write: Callable[[Graph, Node], object]) -> None:
    module = _graph(write)
    ids = _numbered(module, [0, 1, 2, 3])
    split = split_module(module, None, ids)
    calls = [n.target for n in split.graph.nodes if n.op == "call_module"]
    assert calls == ["submod_0", "submod_1", "submod_2", "submod_3"]
    x = torch.tensor([-1.0, 2.0])
    assert same(split(x), module(x))
    # Torch runs the last that became free: the reader after the write comes first.
    assert not same(torch_split(module, module, ids)(x), module(x))


def test_a_module_that_writes_in_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.clone()
            before = -y
            self.relu(y)
            return before, -y

    module = symbolic_trace(Model())
    split = split_module(module, None, _numbered(module, [0, 1, 2, 3]))
    x = torch.tensor([-1.0, 2.0])
    assert same(split(x), module(x))


def test_a_view_counts_as_its_tensor() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    copy = graph.call_method("clone", (x,))
    flat = graph.call_method("view", (copy, -1))
    before = graph.call_function(torch.neg, (copy,))
    graph.call_method("zero_", (flat,))
    graph.output((before, graph.call_function(torch.neg, (copy,))))
    module = GraphModule(nn.Module(), graph)
    split = split_module(module, None, _numbered(module, [0, 1, 2, 3, 4]))
    x_value = torch.ones(2, 2)
    assert same(split(x_value), module(x_value))


def test_tied_attributes_are_one_tensor() -> None:
    root = nn.Module()
    root.register_buffer("count", torch.zeros(2))
    root.register_buffer("same_count", root.get_buffer("count"))
    graph = Graph()
    count, other = graph.get_attr("count"), graph.get_attr("same_count")
    before = graph.call_function(torch.neg, (other,))
    graph.call_method("add_", (count, 1.0))
    graph.output((before, graph.call_function(torch.neg, (other,))))
    module = GraphModule(root, graph)
    # GraphModule keeps both names of one tensor.
    assert module.count is module.same_count
    ops = call_nodes(module)
    assert write_edges(module, ops, {op: i for i, op in enumerate(ops)}) == {
        (0, 1): "count",
        (1, 2): "count",
    }


def test_a_write_between_operators_of_one_partition_is_refused() -> None:
    module = _graph(WRITES["method"])
    with pytest.raises(
        CycleError,
        match=(
            r"^partitions wait for each other: partition 0 comes after partition 1, for clone is"
            r" written in place; partition 1 reads from partition 0; move the operators between"
            r" them into one partition$"
        ),
    ):
        split_module(module, None, _numbered(module, [0, 0, 1, 0]))


def test_reads_of_metadata_do_not_wait() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    copy = graph.call_method("clone", (x,))
    graph.call_method("add_", (copy, 1.0))
    size = graph.call_function(torch.ops.aten.sym_size.int, (copy, 0))
    size.meta["val"] = 2
    graph.output((copy, size))
    module = GraphModule(nn.Module(), graph)
    ops = call_nodes(module)
    assert write_edges(module, ops, {op: i for i, op in enumerate(ops)}) == {}
    # Without the size at capture it may be a tensor, which is read.
    del size.meta["val"]
    assert write_edges(module, ops, {op: i for i, op in enumerate(ops)}) == {(1, 2): "clone"}


def test_a_tensor_that_gives_only_its_type_is_not_aliased() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    written = graph.call_method("clone", (x,))
    graph.call_method("add_", (written, 1.0))
    cast = graph.call_function(torch.ops.aten.type_as.default, (y, written))
    of_y = graph.call_method("neg", (cast,))
    graph.call_method("mul_", (written, 2.0))
    graph.output((written, of_y))
    module = GraphModule(nn.Module(), graph)
    ops = call_nodes(module)
    # The cast comes between the writes; what reads it waits for neither.
    ids = {op: i for i, op in enumerate(ops)}
    assert set(write_edges(module, ops, ids)) == {(1, 2), (1, 4), (2, 4)}


def test_the_result_of_a_user_s_function_may_be_any_operand() -> None:
    def type_as(_: Tensor, other: Tensor) -> Tensor:
        return other

    type_as.__module__ = "somebody"
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    written = graph.call_method("clone", (x,))
    same_tensor = graph.call_function(type_as, (y, written))
    graph.call_method("add_", (written, 1.0))
    graph.output(graph.call_method("neg", (same_tensor,)))
    module = GraphModule(nn.Module(), graph)
    ops = call_nodes(module)
    edges = write_edges(module, ops, {op: i for i, op in enumerate(ops)})
    assert set(edges) == {(1, 2), (2, 3)}


def test_a_graph_without_writes_has_no_edges() -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    ops = call_nodes(module)
    assert write_edges(module, ops, {op: i for i, op in enumerate(ops)}) == {}


def _random_writes(seed: int) -> GraphModule:
    """Return reads, views and writes of a few tensors in any order."""
    rng, graph = random.Random(seed), Graph()
    x = graph.placeholder("x")
    tensors = [graph.call_method("clone", (x,)) for _ in range(2)]
    results: list[Node] = []
    for _ in range(rng.randint(3, 10)):
        tensor = rng.choice(tensors)
        match rng.randrange(5):
            case 0:
                graph.call_method("add_", (tensor, 1.0))
            case 1:
                tensors.append(graph.call_method("mul_", (tensor, 2.0)))
            case 2:
                tensors.append(graph.call_method("view", (tensor, 4)))
            case 3:
                graph.call_function(operator.setitem, (tensor, 0, rng.choice(results or [3.0])))
            case _:
                results.append(graph.call_method("sum", (tensor,)))
    graph.output((tuple(tensors), tuple(results)))
    return GraphModule(nn.Module(), graph)


def test_random_writes_are_correct_or_refused() -> None:
    seen: Counter[str] = Counter()
    x = torch.arange(4.0)
    for seed in range(200):
        module, rng = _random_writes(seed), random.Random(seed)
        ops = call_nodes(module)
        in_order = seed % 2 == 0
        ids = [rng.randrange(4) for _ in ops]
        if in_order:
            ids = sorted(ids)
        try:
            split = split_module(module, None, _numbered(module, ids))
        except CycleError:
            assert not in_order
            seen["refused"] += 1
            continue
        assert same(split(x), module(x))
        by_torch = torch_split(module, module, _numbered(module, ids))(x)
        seen["torch too" if same(by_torch, module(x)) else "only ours"] += 1
    assert seen["refused"] >= 30
    assert seen["torch too"] >= 30
    assert seen["only ours"] >= 10
