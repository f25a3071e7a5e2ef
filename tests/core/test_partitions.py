import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import OpGraph
from fxpart.core.partitions import (
    meetings,
    partition_by_device,
    partition_by_homes,
    partition_order,
)
from fxpart.errors import CycleError
from tests.sketch import Sketch, chain, random_graph


def test_a_chain_cut_twice_has_three_partitions() -> None:
    placed = partition_by_device(chain(6), np.array([0, 0, 1, 1, 2, 2]))
    assert placed.partition_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert placed.devices_of_partition == ((0,), (1,), (2,))


def test_returning_to_a_device_takes_a_second_partition() -> None:
    placed = partition_by_device(chain(3), np.array([0, 1, 0]))
    assert placed.partition_of.tolist() == [0, 1, 2]
    assert placed.devices_of_partition == ((0,), (1,), (0,))


def test_an_independent_operator_joins_the_run_after_it() -> None:
    sketch = Sketch()
    a = sketch.op([], 1)
    mask = sketch.op([], 1)  # on device 1, without dependencies
    b = sketch.op([a, mask], 1)
    placed = partition_by_device(sketch.graph(b), np.array([0, 1, 1]))
    assert placed.partition_of.tolist() == [0, 1, 1]


def test_order_refuses_a_cycle_of_partitions() -> None:
    with pytest.raises(CycleError, match=r"each other.s results: 1 reads from 2 reads from 1; mo"):
        partition_order(3, [(0, 1), (1, 2), (2, 1)], [0, 1, 2])


def _is_one_way(graph: OpGraph, partition_of: np.ndarray) -> bool:
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    is_produced = maker >= 0
    return bool((partition_of[maker[is_produced]] <= partition_of[reader[is_produced]]).all())


@given(seed=st.integers(0, 10_000), n=st.integers(1, 60), count=st.integers(1, 4))
def test_partitions_follow_devices_and_never_form_a_cycle(seed: int, n: int, count: int) -> None:
    graph = random_graph(seed, n)
    device_of = np.random.default_rng(seed).integers(0, count, n)
    placed = partition_by_device(graph, device_of)
    assert (placed.device_of == device_of).all()
    # Numbers only grow along the data, which excludes cycles ...
    assert _is_one_way(graph, placed.partition_of)
    # ... and along the operators of every device, so that running partitions by number runs each
    # device in graph order, as the schedule assumes.
    for device in range(count):
        assert (np.diff(placed.partition_of[device_of == device]) >= 0).all()


HOMES = ((0, 1, 2), (0,), (1,), (2, 0))


@given(seed=st.integers(0, 10_000), n=st.integers(1, 60))
def test_devices_run_in_graph_order_with_replicas_too(seed: int, n: int) -> None:
    graph = random_graph(seed, n)
    home_of = np.random.default_rng(seed).integers(0, len(HOMES), n)
    placed = partition_by_homes(graph, home_of, HOMES)
    assert [placed.devices_of_partition[p] for p in placed.partition_of] == [
        HOMES[home] for home in home_of
    ]
    assert _is_one_way(graph, placed.partition_of)
    for index in range(placed.rounds):
        where = placed.device_of_round(index)
        for device in range(3):
            assert (np.diff(placed.partition_of[where == device]) >= 0).all()


def test_partitions_share_a_device_only_if_their_turns_can_meet() -> None:
    homes = ((0, 1), (1, 0), (0,), (1, 2, 0), (3, 4))
    # 0 and 1 swap; turns of two and of three coincide; nothing else is on 3 and 4.
    assert meetings(homes) == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for a, b in itertools.combinations(range(5), 2):
        first, second = homes[a], homes[b]
        at_once = any(first[i % len(first)] == second[i % len(second)] for i in range(6))
        assert ((a, b) in meetings(homes)) == at_once


@given(seed=st.integers(0, 2_000), n=st.integers(2, 12))
def test_no_two_adjacent_partitions_of_a_device_could_be_merged(seed: int, n: int) -> None:
    graph = random_graph(seed, n)
    device_of = np.random.default_rng(seed).integers(0, 2, n)
    placed = partition_by_device(graph, device_of)
    for device in range(2):
        numbers = [p for p, home in enumerate(placed.devices_of_partition) if home[0] == device]
        for a, b in itertools.pairwise(numbers):
            joined = np.where(placed.partition_of == b, a, placed.partition_of)
            with pytest.raises(CycleError):
                _order_of(graph, joined, device_of)


def _order_of(graph: OpGraph, part: np.ndarray, device_of: np.ndarray) -> list[int]:
    names, part = np.unique(part, return_inverse=True)
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    edges = {(int(part[m]), int(part[r])) for m, r in zip(maker, reader, strict=True) if m >= 0}
    for device in np.unique(device_of):
        order = list(dict.fromkeys(part[device_of == device].tolist()))
        edges |= set(itertools.pairwise(order))
    edges = {(a, b) for a, b in edges if a != b}
    return partition_order(len(names), sorted(edges), list(range(len(names))))
