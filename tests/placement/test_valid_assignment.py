"""Assignments from elsewhere: their order of execution, and those that cannot be executed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import CycleError, SpecError
from fxpart.placement.aot_based import in_valid_order, refuse_torn_groups
from tests.sketch import Sketch, chain, random_graph


def _made(partition_of: list[int], *homes: tuple[int, ...]) -> Assignment:
    return Assignment(np.array(partition_of, dtype=np.int64), homes)


def test_an_ordered_assignment_is_returned_unchanged() -> None:
    placed = _made([0, 0, 1], (2,), (0, 1))
    assert in_valid_order(chain(3), placed) is placed


def test_an_unordered_assignment_is_renumbered() -> None:
    after = in_valid_order(chain(4), _made([2, 2, 0, 1], (5,), (6,), (7, 8)))
    assert after.partition_of.tolist() == [0, 0, 1, 2]
    assert after.devices_of_partition == ((7, 8), (5,), (6,))


def test_a_cycle_is_named_without_the_partitions_that_only_wait_for_it() -> None:
    # 0 runs first; 1 and 3 read from each other; 2 waits for them.
    placed = _made([0, 1, 3, 1, 2], (0,), (1,), (2,), (3,))
    with pytest.raises(CycleError, match=r"each other's results: 1 reads from 3 reads from 1; mo"):
        in_valid_order(chain(5), placed)


def _runs_in_graph_order(placed: Assignment) -> bool:
    """Return whether partitions by number run the operators of every device in graph order."""
    parts = placed.partition_of
    for index in range(placed.rounds):
        where = placed.device_of_round(index)
        for device in np.unique(where):
            ops = np.flatnonzero(where == device)
            by_number = [op for p in range(placed.n_partitions) for op in ops if parts[op] == p]
            if by_number != ops.tolist():
                return False
    return True


def _forked() -> OpGraph:
    """Return four operators of 1 s; the second reads from the first, the others have no inputs."""
    sketch = Sketch()
    a = sketch.op([], 1, flops=1)
    b = sketch.op([a], 1, flops=1)
    return sketch.graph(b, sketch.op([], 1, flops=1), sketch.op([b], 1, flops=1))


def test_partitions_that_interleave_on_a_device_are_cut_again() -> None:
    graph = _forked()
    # The first and last surround the third: by number, the last would be before the third, or the
    # third before the first.
    ordered = in_valid_order(graph, _made([0, 0, 1, 0], (5,), (5,)))
    assert ordered.partition_of.tolist() == [0, 0, 0, 0]
    sketch = Sketch()
    a = sketch.op([], 1, flops=1)
    apart = sketch.graph(*(sketch.op([a], 1, flops=1) for _ in range(3)))
    after = in_valid_order(apart, _made([0, 1, 2, 0], (0,), (1,), (0,)))
    assert after.partition_of.tolist() == [0, 1, 0, 0]
    assert after.devices_of_partition == ((0,), (1,))
    # Replicas that meet on device 1 in the first round, as often as a and b alternate there.
    after = in_valid_order(graph, _made([0, 0, 1, 0], (1, 2), (1,)))
    assert after.partition_of.tolist() == [0, 0, 1, 2]
    assert after.devices_of_partition == ((1, 2), (1,), (1, 2))


def test_replicas_that_never_meet_may_interleave() -> None:
    placed = _made([0, 0, 1, 0], (1, 2), (2, 1))
    assert in_valid_order(_forked(), placed) is placed


def test_partitions_that_alternate_on_a_device_are_renumbered() -> None:
    # 1 runs before 0 on device 4, although neither reads from the other.
    after = in_valid_order(_forked(), _made([1, 1, 0, 2], (4,), (4,), (3,)))
    assert after.partition_of.tolist() == [0, 0, 1, 2]


def _any_homes(rng: np.random.Generator, count: int) -> tuple[tuple[int, ...], ...]:
    """Return one to three devices of four for each partition; some often the same."""
    some = [tuple(rng.permutation(4)[: int(rng.integers(1, 4))].tolist()) for _ in range(3)]
    return tuple(some[int(rng.integers(3))] for _ in range(count))


@given(seed=st.integers(0, 10_000), n=st.integers(1, 14), parts=st.integers(1, 5))
def test_accepted_assignments_run_in_graph_order_on_the_same_devices(
    seed: int, n: int, parts: int
) -> None:
    graph, rng = random_graph(seed, n), np.random.default_rng(seed)
    _, partition_of = np.unique(rng.integers(0, parts, n), return_inverse=True)
    count = int(partition_of.max()) + 1
    placed = Assignment(partition_of.astype(np.int64), _any_homes(rng, count))
    try:
        after = in_valid_order(graph, placed)
    except CycleError:
        assert any(p in known for p, known in enumerate(_depends(graph, placed)))
        return
    assert _runs_in_graph_order(after)
    for op in range(n):
        before = placed.devices_of_partition[placed.partition_of[op]]
        assert after.devices_of_partition[after.partition_of[op]] == before
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            assert maker < 0 or after.partition_of[maker] <= after.partition_of[op]


def test_all_three_outcomes_occur_at_random() -> None:
    unchanged = renumbered = anew = 0
    for seed in range(200):
        graph, rng = random_graph(seed, 6), np.random.default_rng(seed)
        _, partition_of = np.unique(rng.integers(0, 3, 6), return_inverse=True)
        count = int(partition_of.max()) + 1
        placed = Assignment(partition_of.astype(np.int64), _any_homes(rng, count))
        try:
            after = in_valid_order(graph, placed)
        except CycleError:
            continue
        pairs = set(zip(placed.partition_of.tolist(), after.partition_of.tolist(), strict=True))
        unchanged += after is placed
        renumbered += after is not placed and len(pairs) == count
        anew += len(pairs) > count
    assert min(unchanged, renumbered, anew) > 5


def _depends(graph: OpGraph, placed: Assignment) -> list[set[int]]:
    """Return for each partition all those it needs, directly or not, by repeated union."""
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
def test_an_order_is_found_if_there_is_one(seed: int, n: int, parts: int) -> None:
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


def test_operators_of_a_group_may_be_in_several_partitions_of_a_device() -> None:
    refuse_torn_groups(_in_place(), _made([0, 1, 2], (1,), (1,), (0,)))
    refuse_torn_groups(_in_place(), _made([0, 1, 2], (1, 2), (1, 2), (0,)))


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        (((1,), (0,), (0,)), "they are on device 1 and device 0; put both on one"),
        # Together in the first round, apart in the second.
        (((1,), (1, 2), (0,)), "they are on device 1 and devices 1, 2;"),
        (((2, 1), (1, 2), (0,)), "they are on devices 2, 1 and devices 1, 2;"),
    ],
)
def test_a_torn_group_is_refused(homes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(SpecError, match="operators op0 of stem and op1 of body must share") as no:
        refuse_torn_groups(_in_place(), _made([0, 1, 2], *homes))
    assert message in str(no.value)
    assert "\n" not in str(no.value)
