"""The order in which partitions are called, and cycles."""

import random

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.errors import CycleError
from fxpart.execution.split.cut import call_order
from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import by_name, same


def test_partitions_keep_the_graph_order_if_requested() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(f, (x,)) for f in (torch.neg, torch.sin, torch.cos)]
    graph.output(tuple(nodes))
    module = GraphModule(nn.Module(), graph)
    ids = by_name(neg=5, sin=3, cos=4)
    kept = split_module(module, None, ids, keep_original_order=True)
    calls = [n.target for n in kept.graph.nodes if n.op == "call_module"]
    assert calls == ["submod_5", "submod_3", "submod_4"]
    # Otherwise torch's order: the last to become free is next.
    free = split_module(module, None, ids)
    calls = [n.target for n in free.graph.nodes if n.op == "call_module"]
    assert calls == ["submod_4", "submod_3", "submod_5"]


def _circle() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.sin, (a,))
    graph.output(graph.call_function(torch.add, (a, b)))
    return GraphModule(nn.Module(), graph)


def test_a_cycle_names_the_partitions() -> None:
    with pytest.raises(
        CycleError,
        match=(
            r"^partitions wait for each other: partition 0 reads from partition 1; partition 1"
            r" reads from partition 0; move the operators between them into one partition$"
        ),
    ):
        split_module(_circle(), None, by_name(neg=0, sin=1, add=0))


def test_the_order_of_first_operators_gives_way_to_dependences() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.sin, (x,))
    graph.output((a, graph.call_function(torch.mul, (b, b))))
    module = GraphModule(nn.Module(), graph)
    ids = by_name(neg=0, sin=1, mul=0)
    split = split_module(module, None, ids, keep_original_order=True)
    calls = [n.target for n in split.graph.nodes if n.op == "call_module"]
    assert calls == ["submod_1", "submod_0"]
    assert same(split(torch.ones(2)), module(torch.ones(2)))
    with pytest.raises(KeyError):
        torch_split(module, module, ids, keep_original_order=True)  # type: ignore[arg-type]


def test_any_order_respects_the_dependencies() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        count = rng.randint(1, 12)
        # A hidden order that the numbers do not show.
        hidden = rng.sample(range(count), count)
        after: list[list[int]] = [[] for _ in range(count)]
        writes = {}
        for i in range(count):
            for j in range(i + 1, count):
                if rng.random() < 0.3:
                    after[hidden[i]].append(hidden[j])
                elif rng.random() < 0.1:
                    writes[hidden[i], hidden[j]] = "tensor"
        for by_number in (False, True):
            order = call_order(after, writes, ["p"] * count, by_number=by_number)
            place = {part: index for index, part in enumerate(order)}
            assert sorted(order) == list(range(count))
            assert all(place[a] < place[b] for a, row in enumerate(after) for b in row)
            assert all(place[a] < place[b] for a, b in writes)


def test_the_lowest_number_that_can_be_next_is_chosen() -> None:
    # 2 -> 0, while 1 and 3 have no dependencies.
    assert call_order([[], [], [0], []], {}, list("abcd"), by_number=True) == [1, 2, 0, 3]
    assert call_order([[], [], [0], []], {}, list("abcd"), by_number=False) == [3, 2, 0, 1]


@pytest.mark.parametrize("by_number", [False, True])
def test_long_chains_and_long_cycles(by_number: bool) -> None:
    count = 20_000
    names = [str(part) for part in range(count)]
    row = [[part + 1] for part in range(count - 1)]
    assert call_order([*row, []], {}, names, by_number=by_number) == list(range(count))
    with pytest.raises(CycleError, match=r"^partitions wait .*; \.\.\.; .*\n?$") as refusal:
        call_order([*row, [0]], {}, names, by_number=by_number)
    assert len(str(refusal.value)) < 400
