"""The comparison of cuts compares what it says."""

import torch

from benchmarks import split_cut
from benchmarks.split_cut import children, compare_cuts, long_graph
from fxpart.split import split_module


def test_the_graph_has_that_many_operators_and_runs() -> None:
    module = long_graph(50)
    assert len(module.graph.nodes) == 52
    assert module(torch.ones(3)).shape == (3,)
    assert long_graph(50).code == module.code


def test_times_of_a_small_cut() -> None:
    times = compare_cuts(60, 3, 1)
    assert 0 < times.ours_s < times.ours_with_code_s
    assert times.torch_s > 0


def test_children_are_those_of_the_cut() -> None:
    module = long_graph(10)
    ops = list(module.graph.nodes)[1:-1]
    split = split_module(module, None, {op: i // 5 for i, op in enumerate(ops)}.__getitem__)
    assert list(children(split)) == ["submod_0", "submod_1"]


def test_a_cut_that_computes_something_else_is_noticed() -> None:
    module = long_graph(10)
    ops = list(module.graph.nodes)[1:-1]
    part_of = {op: i // 5 for i, op in enumerate(ops)}
    x = torch.linspace(-1.0, 1.0, 4)
    assert split_cut._same(module, part_of, x)
    whole = module.forward
    module.forward = lambda t: whole(t) + 1
    assert not split_cut._same(module, part_of, x)
