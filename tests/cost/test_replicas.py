"""Partitions that several devices compute in turn: their memory and throughput."""

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.holding import holding, weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError
from tests import independent
from tests.independent_replicas import homes, peak_bytes
from tests.sketch import Sketch, devices, problem, random_graph

GB = 10**9


def _pair(rate: float = 1.0, speeds: list[float] | None = None, count: int = 3) -> Problem:
    """Return a (4 s, 5 bytes, weight 100) -> b (2 s, 3 bytes, weight 10), with an input of 7."""
    sketch = Sketch()
    a = sketch.op([sketch.input(7)], 5, [sketch.weight(100)], 4)
    b = sketch.op([a], 3, [sketch.weight(10)], 2)
    return problem(sketch.graph(b), devices(*[GB] * count, link=Link(rate), speeds=speeds))


def _placed(*homes: tuple[int, ...]) -> Assignment:
    return Assignment(np.arange(len(homes)), homes)


def test_a_partition_on_two_devices_alternates_between_them() -> None:
    result = evaluate(_pair(), _placed((0, 1), (2,)))
    # a sends 5 bytes in 5 s to device 2, from 0 and from 1 in turn.
    assert (result.rounds, result.replicas, result.devices_used) == (2, 2, 3)
    assert [use.load_s for use in result.devices] == [2, 2, 2]
    # Over two inputs: 4 s on devices 0 and 1 each, 4 s on device 2, 5 s on each of two links.
    assert result.throughput_per_s == 2 / 5
    assert result.latency_s == 4 + 5 + 2
    assert result.transfer_bytes == 5
    assert [use.received_bytes for use in result.devices] == [0, 0, 5]
    assert [use.partitions for use in result.devices] == [(0,), (0,), (1,)]
    assert [use.operators for use in result.devices] == [1, 1, 1]
    # weight, input and the result of a; the replica holds the same although it waits at first.
    assert [use.peak_bytes for use in result.devices] == [112, 112, 10 + 5 + 3]
    assert [use.static_bytes for use in result.devices] == [112, 112, 18]
    assert result.memory[1].op.tolist() == []
    assert result.memory[0].held_bytes.tolist() == [112]


def test_the_latency_is_that_of_the_first_input() -> None:
    # Device 1 is four times as fast; the second input goes there and takes 1 + 5 + 2 s.
    fast = _pair(speeds=[1.0, 4.0, 1.0])
    assert evaluate(fast, _placed((0, 1), (2,))).latency_s == 4 + 5 + 2
    assert evaluate(fast, _placed((1, 0), (2,))).latency_s == 1 + 5 + 2
    loads = [use.load_s for use in evaluate(fast, _placed((0, 1), (2,))).devices]
    assert loads == [2, 0.5, 2]


def test_devices_hold_weights_of_every_round_and_tensors_of_the_largest() -> None:
    # Round 0: a on 0, b on 0. Round 1: a on 1, b on 0. Device 0 holds both weights throughout.
    result = evaluate(_pair(), _placed((0, 1), (0,)))
    # On 0 at b in round 0: input, a and b; in round 1: the received a, and b.
    assert result.devices[0].peak_bytes == 100 + 10 + 7 + 5 + 3
    assert result.devices[1].peak_bytes == 100 + 7 + 5
    assert [use.weight_bytes for use in result.devices] == [110, 100, 0]
    assert [use.partitions for use in result.devices] == [(0, 1), (0,), ()]
    # Device 0 computes a and b, 6 s, then only b, 2 s; the link carries 5 bytes every other time.
    assert [use.load_s for use in result.devices] == [4, 2, 0]
    assert result.throughput_per_s == 2 / 8
    # 5 bytes for two inputs: 2.5, rounded half up.
    assert result.transfer_bytes == result.devices[0].received_bytes == 3


def test_a_weight_used_by_both_partitions_counts_once() -> None:
    sketch = Sketch()
    tied = sketch.weight(50)
    a = sketch.op([], 1, [tied], 1)
    b = sketch.op([a], 1, [tied], 1)
    this = problem(sketch.graph(b), devices(GB, GB))
    result = evaluate(this, _placed((0, 1), (1, 0)))
    assert [use.weight_bytes for use in result.devices] == [50, 50]


def test_turns_of_two_and_three_repeat_after_six() -> None:
    placed = _placed((0, 1), (2, 3, 4))
    assert (placed.rounds, placed.replicas) == (6, 3)
    assert [placed.device_of_round(i).tolist() for i in range(6)] == [
        [0, 2], [1, 3], [0, 4], [1, 2], [0, 3], [1, 4],
    ]  # fmt: skip
    result = evaluate(_pair(count=5), placed)
    assert [use.load_s for use in result.devices] == pytest.approx([2, 2, 2 / 3, 2 / 3, 2 / 3])
    # Six inputs keep devices 0 and 1 busy for 12 s each; a link carries one of six.
    assert result.throughput_per_s == 6 / 12


def test_the_same_device_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="partition 1 is on devices 2, 0, 2, one of them twice"):
        _placed((0,), (2, 0, 2))


def test_turns_with_a_very_long_period_are_refused() -> None:
    homes = [tuple(range(count)) for count in (7, 11, 13, 2)]
    with pytest.raises(
        SpecError, match="of 2, 7, 11, 13 take turns that repeat only after 2002 in"
    ):
        _placed(*homes)


@pytest.mark.parametrize("homes", [(3,), (0, 3), (-1,)])
def test_an_unknown_device_is_refused(homes: tuple[int, ...]) -> None:
    message = f"uses device {homes[-1]}, there are 3"
    with pytest.raises(SpecError, match=message):
        evaluate(_pair(), _placed((0,), homes))


def test_an_assignment_of_another_size_is_refused() -> None:
    with pytest.raises(SpecError, match="places 3 operators, the model has 2"):
        evaluate(_pair(), _placed((0,), (0,), (0,)))


def _replicated(seed: int, n: int, count: int) -> tuple[Problem, Assignment]:
    """Return a random model, cut at random, each partition on up to four random devices."""
    rng = np.random.default_rng(seed)
    this = problem(
        random_graph(seed, n),
        devices(
            *[GB] * count,
            link=Link(4.0, 0.25),
            far=Link(1.0, 0.5),
            speeds=[float(s) for s in rng.integers(1, 4, count)],
            nodes=[int(node) for node in rng.integers(0, 2, count)],
        ),
    )
    cut = partition_by_device(this.graph, rng.integers(0, count, n))
    homes = tuple(
        tuple(rng.permutation(count)[: int(rng.integers(1, min(count, 4) + 1))].tolist())
        for _ in range(cut.n_partitions)
    )
    return this, Assignment(cut.partition_of, homes)


def _slow_busiest_s(this: Problem, placed: Assignment) -> float:
    """Return the load of the busiest device or link per input, counted input by input."""
    graph, topology = this.graph, this.topology
    busy: dict[tuple[int, ...], float] = defaultdict(float)
    for index in range(placed.rounds):
        where = [homes(placed, op)[index % len(homes(placed, op))] for op in range(graph.n_ops)]
        sent = set()
        for op, here in enumerate(where):
            busy[(here,)] += float(this.costs.op_time_s[op, here])
            for value in graph.reads_of(op).tolist():
                maker = int(graph.value_producer[value])
                if maker >= 0 and where[maker] != here:
                    sent.add((value, where[maker], here))
        for value, source, target in sorted(sent):
            busy[source, target] += float(topology.latency_s[source, target])
            rate = float(topology.bytes_per_s[source, target])
            busy[source, target] += int(graph.value_bytes[value]) / rate
    return max(busy.values()) / placed.rounds


@given(seed=st.integers(0, 10_000), n=st.integers(1, 20), count=st.integers(1, 5))
def test_replicas_agree_with_the_independent_computation(seed: int, n: int, count: int) -> None:
    this, placed = _replicated(seed, n, count)
    result = evaluate(this, placed, search_bounds=False)
    for device in range(count):
        assert result.devices[device].peak_bytes == peak_bytes(this, placed, device)
        assert result.devices[device].peak_bytes <= result.devices[device].static_bytes
    busiest = _slow_busiest_s(this, placed)
    assert result.throughput_per_s == pytest.approx(1 / busiest if busiest else float("inf"))
    assert result.latency_s == pytest.approx(independent.latency_s(this, placed.device_of))
    received = Fraction(sum(_received(this, placed)), placed.rounds)
    assert abs(result.transfer_bytes - received) <= Fraction(1, 2)


def _received(this: Problem, placed: Assignment) -> list[int]:
    sizes = []
    for index in range(placed.rounds):
        single_round = partition_by_device(this.graph, placed.device_of_round(index))
        sizes.append(evaluate(this, single_round, search_bounds=False).transfer_bytes)
    return sizes


@given(seed=st.integers(0, 10_000), n=st.integers(1, 20), count=st.integers(1, 4))
def test_a_replica_never_needs_less_than_any_of_its_rounds(seed: int, n: int, count: int) -> None:
    this, placed = _replicated(seed, n, count)
    holding_bytes = holding(this.memory, placed, count)
    for index in range(placed.rounds):
        where = placed.device_of_round(index)
        for device in range(count):
            assert holding_bytes.peak_bytes[device] >= independent.peak_bytes(
                this.graph, where, device
            )
            ops = np.flatnonzero(where == device)
            assert holding_bytes.weight_bytes[device] >= weight_bytes_of(this.memory, ops)
