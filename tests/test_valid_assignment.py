"""Assignments made elsewhere: in which order they run, and which cannot be carried out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.assignment import Assignment
from fxpart.errors import CycleError, SpecError
from fxpart.graph import OpGraph
from fxpart.valid_assignment import in_valid_order, refuse_torn_groups
from tests.sketch import Sketch, chain, random_graph


def _made(partition_of: list[int], *homes: tuple[int, ...]) -> Assignment:
    return Assignment(np.array(partition_of, dtype=np.int64), homes)


def test_what_is_in_order_stays_the_same_object() -> None:
    placed = _made([0, 0, 1], (2,), (0, 1))
    assert in_valid_order(chain(3), placed) is placed


def test_what_is_not_is_renumbered() -> None:
    after = in_valid_order(chain(4), _made([2, 2, 0, 1], (5,), (6,), (7, 8)))
    assert after.partition_of.tolist() == [0, 0, 1, 2]
    assert after.devices_of_partition == ((7, 8), (5,), (6,))


def test_a_circle_is_named_without_those_that_only_wait_for_it() -> None:
    # 0 runs first; 1 and 3 read from each other; 2 waits for them.
    placed = _made([0, 1, 3, 1, 2], (0,), (1,), (2,), (3,))
    with pytest.raises(CycleError, match=r"each other's results: 1 reads from 3 reads from 1; mo"):
        in_valid_order(chain(5), placed)


def _depends(graph: OpGraph, placed: Assignment) -> list[set[int]]:
    """Return for each partition all those it needs, directly or not: by repeated union."""
    needs: list[set[int]] = [set() for _ in range(placed.n_partitions)]
    for op in range(graph.n_ops):
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            if maker >= 0 and placed.partition_of[maker] != placed.partition_of[op]:
                needs[placed.partition_of[op]].add(int(placed.partition_of[maker]))
    for _ in needs:
        for known in needs:
            known |= {far for near in list(known) for far in needs[near]}
    return needs


@given(seed=st.integers(0, 10_000), n=st.integers(1, 12), parts=st.integers(1, 5))
def test_an_order_is_found_where_there_is_one(seed: int, n: int, parts: int) -> None:
    graph, rng = random_graph(seed, n), np.random.default_rng(seed)
    _, partition_of = np.unique(rng.integers(0, parts, n), return_inverse=True)
    count = int(partition_of.max()) + 1
    placed = Assignment(partition_of.astype(np.int64), tuple((p,) for p in range(count)))
    needs = _depends(graph, placed)
    if any(p in known for p, known in enumerate(needs)):
        with pytest.raises(CycleError) as caught:
            in_valid_order(graph, placed)
        names = str(caught.value).split(": ")[1].split(";")[0].split(" reads from ")
        circle = [int(name) for name in names]
        assert circle[0] == circle[-1]
        assert all(b in needs[a] for a, b in itertools.pairwise(circle))
        return
    after = in_valid_order(graph, placed)
    assert np.array_equal(after.device_of, placed.device_of)
    for op in range(n):
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            assert maker < 0 or after.partition_of[maker] <= after.partition_of[op]


def _in_place() -> OpGraph:
    sketch = Sketch()
    a = sketch.op([], 4, module="stem")
    b = sketch.op([a], 4, view_of=a, module="body", group=0)
    return sketch.graph(sketch.op([b], 1))


def test_operators_that_must_share_a_device_may_be_in_several_partitions_of_it() -> None:
    refuse_torn_groups(_in_place(), _made([0, 1, 2], (1,), (1,), (0,)))
    refuse_torn_groups(_in_place(), _made([0, 1, 2], (1, 2), (1, 2), (0,)))


@pytest.mark.parametrize(
    ("homes", "said"),
    [
        (((1,), (0,), (0,)), "they are on device 1 and device 0; put both on one"),
        # Together in the first round, apart in the second.
        (((1,), (1, 2), (0,)), "they are on device 1 and devices 1, 2;"),
        (((2, 1), (1, 2), (0,)), "they are on devices 2, 1 and devices 1, 2;"),
    ],
)
def test_a_torn_group_is_refused(homes: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(SpecError, match="operators op0 of stem and op1 of body must share") as no:
        refuse_torn_groups(_in_place(), _made([0, 1, 2], *homes))
    assert said in str(no.value)
    assert "\n" not in str(no.value)
