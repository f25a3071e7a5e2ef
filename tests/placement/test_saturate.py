"""A placement copied onto idle devices: by hand, and against trying all copies."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import MOST_ROUNDS, Assignment
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.placement import make_mode
from fxpart.placement.saturate import saturate
from tests.sketch import Sketch, chain, devices, problem, random_graph


def _pair(*memory_bytes: int, speeds: list[float] | None = None) -> Problem:
    """Return a (weight 100) -> b (weight 10); b reads the result of a; both have 1 byte."""
    sketch = Sketch()
    a = sketch.op([], 1, [sketch.weight(100)], 4)
    b = sketch.op([a], 1, [sketch.weight(10)], 2)
    return problem(sketch.graph(b), devices(*memory_bytes, speeds=speeds))


def _split(*homes: tuple[int, ...]) -> Assignment:
    return Assignment(np.arange(len(homes)), homes)


def test_each_copy_uses_the_smallest_devices_that_fit() -> None:
    # a needs 101 bytes and b 12; idle are 2 to 7.
    this = _pair(500, 500, 12, 101, 200, 13, 101, 11)
    full = saturate(this, _split((0,), (1,)))
    # First a to 3 and b to 2; then a to 6 and b to 5; then a to 4, and b has only 11 bytes.
    assert full.devices_of_partition == ((0, 3, 6), (1, 2, 5))
    assert full.partition_of.tolist() == [0, 1]
    result = evaluate(this, full)
    assert result.devices_used == 6
    assert all(use.peak_bytes <= use.memory_bytes for use in result.devices)


def test_an_incomplete_round_is_dropped() -> None:
    this = _pair(500, 500, 12, 12, 12)
    placed = _split((0,), (1,))
    assert saturate(this, placed).devices_of_partition == ((0,), (1,))


def test_without_idle_devices_nothing_changes() -> None:
    assert saturate(_pair(500, 500), _split((0,), (1,))).devices_of_partition == ((0,), (1,))


def test_copies_on_equal_devices_multiply_the_throughput_but_not_the_latency() -> None:
    this = _pair(*[200] * 7)
    before = _split((0,), (1,))
    full = saturate(this, before)
    assert full.devices_of_partition == ((0, 2, 4), (1, 3, 5))
    single, copied = evaluate(this, before), evaluate(this, full)
    assert copied.throughput_per_s == pytest.approx(3 * single.throughput_per_s)
    assert copied.latency_s == single.latency_s
    assert (copied.replicas, copied.rounds) == (3, 3)
    assert [use.load_s for use in copied.devices] == pytest.approx([4 / 3, 2 / 3] * 3 + [0])


def test_a_slower_device_with_enough_memory_is_used() -> None:
    this = _pair(200, 200, speeds=[4.0, 1.0])
    full = saturate(this, _split((0,), (0,)))
    assert full.devices_of_partition == ((0, 1), (0, 1))
    # Of two inputs one takes 1.5 s on the fast device and one 6 s on the slow one.
    assert evaluate(this, full).throughput_per_s == 2 / 6


def test_existing_replicas_stay_in_step_with_the_copies() -> None:
    # a alternates between 0 and 1, b is on 2 only; the copies of 0, 1, 2 are 3, 4, 5.
    full = saturate(_pair(*[200] * 6), _split((0, 1), (2,)))
    assert full.devices_of_partition == ((0, 3, 1, 4), (2, 5))
    original = {0, 1, 2}
    for index in range(full.rounds):
        used = set(full.device_of_round(index).tolist())
        assert used <= original or not used & original


def test_copies_are_limited_by_the_number_of_turns() -> None:
    homes = (tuple(range(7)), tuple(range(11)), tuple(range(13)))
    this = problem(chain(3), devices(*[200] * 40))
    full = saturate(this, _split(*homes))
    # 1,001 turns already: two copies would make 2,002.
    assert full.rounds == 1001 <= MOST_ROUNDS
    assert full.devices_of_partition == homes


def _most_copies(needed: list[int], idle: list[int]) -> int:
    """Return how often the needs can be met, each by a separate idle device, by trying all."""
    best = 0
    for count in range(1, len(idle) // len(needed) + 1):
        all_needed = needed * count
        fits = any(
            all(size >= need for size, need in zip(chosen, all_needed, strict=True))
            for chosen in itertools.permutations(idle, len(all_needed))
        )
        best = count if fits else best
    return best


@given(
    needed=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    idle=st.lists(st.integers(1, 8), max_size=6),
)
def test_the_number_of_copies_is_maximal(needed: list[int], idle: list[int]) -> None:
    sketch = Sketch()
    for size in needed:
        sketch.op([], 0, [sketch.weight(size)], 1)
    this = problem(sketch.graph(), devices(*[9] * len(needed), *idle))
    placed = _split(*((device,) for device in range(len(needed))))
    assert saturate(this, placed).replicas == 1 + _most_copies(needed, idle)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 20), spare=st.integers(0, 9))
def test_every_copy_fits_and_only_the_devices_grow(seed: int, n: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, n)
    large = 10**6
    sizes = [large, large, *rng.integers(1, 200, spare).tolist()]
    this = problem(graph, devices(*sizes))
    placed = make_mode("size_based")(this)
    full = saturate(this, placed)
    assert np.array_equal(full.partition_of, placed.partition_of)
    for before, after in zip(placed.devices_of_partition, full.devices_of_partition, strict=True):
        assert after[0] == before[0]
        assert len(after) == full.replicas
    result = evaluate(this, full, search_bounds=False)
    assert all(use.peak_bytes <= use.memory_bytes for use in result.devices)
    assert saturate(this, placed).devices_of_partition == full.devices_of_partition
