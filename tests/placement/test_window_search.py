"""Chains of moves in windows, and kicks: never slower, never overfull, groups intact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.graph import IntArray
from fxpart.core.topology import Link
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.placement.search.local_search import improve
from fxpart.placement.search.refine import SearchOptions, kick, latency_of, search_tables
from fxpart.placement.search.units import atomic_units, working_units
from fxpart.placement.search.window_search import improve_windows
from tests.sketch import Sketch, devices, problem, random_graph


def _start(seed: int, n: int, slack: float) -> tuple[Problem, IntArray]:
    """Return a random placement, and devices with `slack` times what each then needs."""
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, n)
    device_of = rng.integers(0, 3, size=n)[graph.group]
    peaks = peak_bytes(problem(graph, devices(1)).memory, device_of, 3)
    sizes = [max(1, int(bytes_ * slack)) for bytes_ in peaks]
    return problem(graph, devices(*sizes, link=Link(8.0, 0.125))), device_of


def _holds(this: Problem, device_of: IntArray) -> bool:
    fits = peak_bytes(this.memory, device_of, 3) <= this.topology.memory_bytes
    return bool(fits.all()) and np.array_equal(device_of, device_of[this.graph.group])


@settings(max_examples=30)
@given(seed=st.integers(0, 5_000), n=st.integers(1, 200), slack=st.sampled_from([1.0, 1.2, 9.0]))
def test_windows_only_improve(seed: int, n: int, slack: float) -> None:
    this, device_of = _start(seed, n, slack)
    before, tables = latency_of(this, device_of), search_tables(this, SearchOptions())
    units = working_units(this.graph, this.costs.op_time_s.max(axis=1) > 0)
    latency_s = improve_windows(tables, device_of, units, 8)
    assert latency_s == pytest.approx(latency_of(this, device_of))
    assert latency_s <= before * (1 + 1e-9)
    assert _holds(this, device_of)


@given(seed=st.integers(0, 5_000), n=st.integers(1, 60), slack=st.sampled_from([1.0, 1.2, 9.0]))
def test_kicks_only_improve_and_are_reproducible(seed: int, n: int, slack: float) -> None:
    this, device_of = _start(seed, n, slack)
    before, units = latency_of(this, device_of), atomic_units(this.graph)
    trials = []
    for _ in range(2):
        trial = device_of.copy()
        kick(search_tables(this, SearchOptions()), trial, units, 20, 8, seed=3)
        trials.append(trial)
    assert trials[0].tolist() == trials[1].tolist()
    assert latency_of(this, trials[0]) <= before * (1 + 1e-9)
    assert _holds(this, trials[0])


def test_a_chain_finds_what_no_single_move_does() -> None:
    """Two operators with 40 bytes between them, at 1 byte/s: one alone on another device loses."""
    sketch = Sketch()
    # The user of the weight is too large for the second device: the pair moves, or nothing.
    large = sketch.weight(900)
    top = sketch.op([], 1, [large], flops=1)
    first = sketch.op([top], 40, flops=10)
    second = sketch.op([first], 1, flops=10)
    beside = sketch.op([top], 1, [large], flops=20)
    end = sketch.op([second, beside], 1, [large], flops=1)
    this = problem(sketch.graph(end), devices(9999, 100))
    units, tables = atomic_units(this.graph), search_tables(this, SearchOptions())
    alone, chained = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
    assert improve(tables, alone, units, 8) == 42.0
    # 1, then one byte there, 20 in parallel with the 20 at home, one byte back, 1.
    assert improve_windows(tables, chained, units, 8) == 24.0
    assert chained.tolist() == [0, 1, 1, 0, 0]


def test_of_twenty_equal_devices_the_first_are_used() -> None:
    """Ties go to the first of equals, however many there are."""
    sketch = Sketch()
    top = sketch.op([], 1, flops=1)
    ends = [sketch.op([top], 1, flops=9) for _ in range(3)]
    this = problem(sketch.graph(sketch.op(ends, 1, flops=1)), devices(*[999] * 20, link=Link(9.0)))
    device_of = np.zeros(5, dtype=np.int64)
    improve(search_tables(this, SearchOptions()), device_of, atomic_units(this.graph), 8)
    assert set(device_of.tolist()) == {0, 1, 2}
