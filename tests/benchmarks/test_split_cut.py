"""The comparison of splits."""

import pytest
import torch
from torch import fx

from benchmarks import split_cut
from benchmarks.split_cut import children, compare_cuts, long_graph, main
from fxpart.torch_compat.split_module import split_module


def test_the_graph_has_the_given_number_of_operators_and_runs() -> None:
    module = long_graph(50)
    assert len(module.graph.nodes) == 52
    assert module(torch.ones(3)).shape == (3,)
    assert long_graph(50).code == module.code


def test_a_row_has_the_partitions_and_five_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["40", "1"])
    title, *_, first, second = capsys.readouterr().out.splitlines()
    assert title == "40 operators, median of 1, outputs and code equal"
    assert [line.split()[0] for line in (first, second)] == ["8", "200"]
    for line in (first, second):
        assert len([float(cell) for cell in line.split()]) == 6


def test_differing_splits_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_cut, "torch_split", lambda m, root, _: split_module(m, root, zero))
    with pytest.raises(AssertionError):
        compare_cuts(20, 3, 1)


def zero(_: fx.Node) -> int:
    return 0


def test_children_are_the_submodules_of_the_split() -> None:
    module = long_graph(10)
    ops = list(module.graph.nodes)[1:-1]
    split = split_module(module, None, {op: i // 5 for i, op in enumerate(ops)}.__getitem__)
    assert list(children(split)) == ["submod_0", "submod_1"]


def test_a_split_with_another_result_is_detected() -> None:
    module = long_graph(10)
    ops = list(module.graph.nodes)[1:-1]
    part_of = {op: i // 5 for i, op in enumerate(ops)}
    x = torch.linspace(-1.0, 1.0, 4)
    assert split_cut._same(module, part_of, x)
    whole = module.forward
    module.forward = lambda t: whole(t) + 1
    assert not split_cut._same(module, part_of, x)
