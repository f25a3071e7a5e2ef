"""Groups of whole modules, by hand and on random graphs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.granularity import depth_of, group_operators
from fxpart.core.graph import OpGraph
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from tests.placement.test_contract import FREE
from tests.sketch import Sketch, devices, problem, random_graph

PATHS = ["", "a.b", "a", "a.b", "c", "c", "", "a.b.d", "c"]


def _graph(paths: list[str], groups: dict[int, int] | None = None) -> OpGraph:
    sketch = Sketch()
    for op, path in enumerate(paths):
        sketch.op([], 1, [sketch.weight(10)], 1, module=path, group=(groups or {}).get(op, -1))
    return sketch.graph()


@pytest.mark.parametrize(
    ("granularity", "groups"),
    [
        ("operator", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        # Equal paths form one group anywhere; operators of the model itself also share one path.
        ("module", [0, 1, 2, 1, 4, 4, 0, 7, 4]),
        # a, c; operators of the model itself only next to one another.
        (1, [0, 1, 1, 1, 4, 4, 6, 1, 4]),
        # a.b and everything below; a and c are above that depth: 4 and 5 are neighbours.
        (2, [0, 1, 2, 1, 4, 4, 6, 1, 8]),
        ("3", [0, 1, 2, 3, 4, 4, 6, 7, 8]),
    ],
)
def test_operators_of_a_module_stay_together(granularity: str | int, groups: list[int]) -> None:
    assert group_operators(_graph(PATHS), granularity).group.tolist() == groups


def test_adjacent_modules_above_the_depth_stay_separate() -> None:
    assert group_operators(_graph(["a", "a", "b", "a"]), 2).group.tolist() == [0, 0, 2, 3]


def test_a_name_with_the_same_prefix_is_another_module() -> None:
    assert group_operators(_graph(["h.1", "h.10", "h.1"]), 2).group.tolist() == [0, 1, 0]


def test_existing_groups_merge_with_the_modules_they_touch() -> None:
    # Operator 2 must stay with operator 1, so modules a and b are one.
    graph = _graph(["a", "a", "b", "c", "b"], {2: 1})
    assert group_operators(graph, "module").group.tolist() == [0, 0, 0, 3, 0]


def _layers(count: int) -> OpGraph:
    """Return a chain of layers, each of which begins with a check of its input."""
    sketch = Sketch()
    value, maker = sketch.op([], 1, [sketch.weight(10)], 1, module="embed"), 0
    for i in range(count):
        sketch.ops.append(([value], [], 0, 0, f"h.{i}", maker))
        maker = len(sketch.ops)
        value = sketch.op([value], 1, [sketch.weight(10)], 1, module=f"h.{i}")
    return sketch.graph(value)


def test_the_check_of_a_result_does_not_tie_modules_together() -> None:
    graph = _layers(3)
    assert graph.is_check.tolist() == [False, True, False, True, False, True, False]
    for granularity in ("module", 2):
        group = group_operators(graph, granularity).group
        assert group.tolist() == [0, 0, 2, 2, 4, 4, 6]
    assert group_operators(graph, 1).group.tolist() == [0, 0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("wrong", ["modul", "0", "-1", "1.5", "", "²", 0, -2])
def test_a_granularity_that_does_not_exist_is_refused(wrong: str | int) -> None:
    with pytest.raises(SpecError, match=f"granularity={wrong} does not exist; .*module.*: 1, 2, 3"):
        group_operators(_graph(["a"]), wrong)


def test_depths_are_positive_integers() -> None:
    granularities = ("operator", "module", "2", 3)
    assert [depth_of(granularity) for granularity in granularities] == [None, None, 2, 3]


def _same_group_as_asked(graph: OpGraph, granularity: str | int) -> list[list[bool]]:
    """Return which pairs must share a device: linked in any number of steps."""
    n = graph.n_ops
    together = graph.group[:, None] == graph.group[None, :]
    for a in range(n):
        for b in range(n):
            first, second = graph.modules[a], graph.modules[b]
            if granularity == "module":
                together[a, b] |= first == second
                continue
            depth = int(granularity)
            heads = [path.split(".")[:depth] if path else [] for path in (first, second)]
            if len(heads[0]) == len(heads[1]) == depth:
                together[a, b] |= heads[0] == heads[1]
            elif first == second:
                together[a, b] |= all(
                    path == first for path in graph.modules[min(a, b) : max(a, b) + 1]
                )
    for _ in range(n):
        together = together @ together
    return [[bool(x) for x in row] for row in together]


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 25),
    granularity=st.sampled_from(["module", 1, 2, 3]),
)
def test_groups_hold_exactly_the_linked_operators(
    seed: int, n: int, granularity: str | int
) -> None:
    graph = random_graph(seed, n)
    group = group_operators(graph, granularity).group
    expected = _same_group_as_asked(graph, granularity)
    assert (group[:, None] == group[None, :]).tolist() == expected
    assert all(group[op] == min(np.flatnonzero(group == group[op])) for op in range(n))


@pytest.mark.parametrize("mode", FREE)
def test_modes_keep_modules_whole(mode: str) -> None:
    placed, split = 0, 0
    for seed in range(30):
        granularity = ("module", 1)[seed % 2]
        graph = group_operators(random_graph(seed, 20), granularity)
        this = problem(graph, devices(120, 120, 120))
        try:
            options = {"steps": 5} if mode == "optimal" else None  # instead of a time limit
            device_of = make_mode(mode, options)(this).device_of
        except InfeasibleError:
            continue
        assert (device_of == device_of[graph.group]).all()
        placed += 1
        split += len(np.unique(device_of)) > 1
    assert placed > 5
    assert mode == "single" or split > 0
