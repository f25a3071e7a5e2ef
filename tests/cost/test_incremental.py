"""Heads, tails and estimates against full simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import IntArray
from fxpart.core.topology import Link
from fxpart.cost.incremental import (
    estimate,
    estimate_from,
    first_affected,
    least_square,
    make_progress,
    refresh,
    set_checkpoints,
)
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.problem import Problem
from tests.sketch import Sketch, chain, devices, problem, random_graph


def _placed(seed: int, n: int, count: int) -> tuple[Problem, IntArray, np.random.Generator]:
    """Return a random problem and a random placement of it."""
    rng = np.random.default_rng(seed)
    speeds = [float(s) for s in rng.integers(1, 4, size=count)]
    topology = devices(*[10**9] * count, link=Link(2.0, 0.25), speeds=speeds)
    return problem(random_graph(seed, n), topology), rng.integers(0, count, size=n), rng


def test_tails_of_two_devices_by_hand() -> None:
    # a (2 s) -> b (3 s) on another device; 4 bytes at 2 bytes/s and 0.5 s: 2.5 s in transit.
    sketch = Sketch()
    a = sketch.op([], 4, flops=2)
    b = sketch.op([a], 1, flops=3)
    side = sketch.op([], 1, flops=1)
    this = problem(sketch.graph(b, side), devices(99, 99, link=Link(2.0, 0.5)))
    progress = make_progress(this.costs)
    assert refresh(this.costs, np.array([0, 1, 0]), progress) == 7.5
    assert progress.tail_s.tolist() == [7.5, 3.0, 1.0]
    # The third operator runs on the first device from 2 s to 3 s: nothing waits for it.
    assert progress.critical.tolist() == [True, True, False]


@given(seed=st.integers(0, 10_000), n=st.integers(1, 120), count=st.integers(1, 4))
def test_heads_and_tails_agree_with_the_simulation(seed: int, n: int, count: int) -> None:
    this, device_of, _ = _placed(seed, n, count)
    progress, log = make_progress(this.costs), schedule_log(this.costs)
    latency = refresh(this.costs, device_of, progress)
    expected, _ = schedule(this.costs, device_of, log)
    # Sums in another order: equal up to rounding.
    assert latency == pytest.approx(expected)
    np.testing.assert_allclose(progress.log.start_s, log.start_s)
    through = progress.log.start_s + progress.tail_s
    assert through.max() == pytest.approx(latency)
    assert progress.critical.any()
    # Nothing is on a longer path than the longest.
    assert (through <= latency * (1 + 1e-9)).all()


@given(seed=st.integers(0, 10_000), n=st.integers(33, 150), count=st.integers(2, 4))
def test_an_estimate_from_the_start_is_exact(seed: int, n: int, count: int) -> None:
    """No transfer begins before the span, and no path avoids it: nothing is missed."""
    this, device_of, rng = _placed(seed, n, count)
    progress = make_progress(this.costs)
    refresh(this.costs, device_of, progress)
    last = int(rng.integers(0, n))
    moved = device_of.copy()
    moved[: last + 1] = rng.integers(0, count, size=last + 1)
    estimated_s, _, _ = estimate(this.costs, moved, progress, 0, last)
    assert estimated_s == pytest.approx(schedule(this.costs, moved, schedule_log(this.costs))[0])


@given(seed=st.integers(0, 10_000), n=st.integers(33, 150), count=st.integers(2, 4))
def test_without_a_change_every_span_reports_its_longest_path(
    seed: int, n: int, count: int
) -> None:
    this, device_of, rng = _placed(seed, n, count)
    progress = make_progress(this.costs)
    latency = refresh(this.costs, device_of, progress)
    first, last = sorted(int(x) for x in rng.integers(0, n, size=2))
    estimated_s, _, _ = estimate(this.costs, device_of, progress, first, last)
    assert estimated_s <= latency * (1 + 1e-9)
    critical = int(rng.choice(np.flatnonzero(progress.critical)))
    first, last = int(rng.integers(0, critical + 1)), int(rng.integers(critical, n))
    estimated_s, _, _ = estimate(this.costs, device_of, progress, first, last)
    assert estimated_s == pytest.approx(latency)


def test_an_estimate_does_not_change_the_progress() -> None:
    this = problem(chain(100), devices(10**6, 10**6))
    device_of = np.zeros(100, dtype=np.int64)
    progress = make_progress(this.costs)
    refresh(this.costs, device_of, progress)
    tails, starts = progress.tail_s.copy(), progress.log.start_s.copy()
    moved = device_of.copy()
    moved[50] = 1
    # There and back, 1 byte at 1 byte/s: two more seconds.
    assert estimate(this.costs, moved, progress, 50, 50)[:2] == (102.0, 2.0)
    np.testing.assert_array_equal(progress.tail_s, tails)
    np.testing.assert_array_equal(progress.log.start_s, starts)


@given(seed=st.integers(0, 10_000), n=st.integers(33, 150), count=st.integers(1, 4))
def test_estimates_from_checkpoints_are_those_of_whole_spans(seed: int, n: int, count: int) -> None:
    """To the last bit, for operators of a span in the order of what they affect, latest first."""
    this, device_of, rng = _placed(seed, n, count)
    progress = make_progress(this.costs)
    refresh(this.costs, device_of, progress)
    first, last = sorted(int(x) for x in rng.integers(0, n, size=2))
    # A chain has moved operators since the placement was simulated.
    device_of[first : last + 1] = rng.integers(0, count, size=last + 1 - first)
    expected = {}
    for op in range(first, last + 1):
        affected = first_affected(this.costs, progress, np.array([op]), first)
        moved = device_of.copy()
        moved[op] = rng.integers(0, count)
        whole = estimate(this.costs, moved, progress, first, last)
        expected[op] = affected, moved, whole
    set_checkpoints(this.costs, device_of, progress, first, last)
    for op, (affected, moved, whole) in sorted(expected.items(), key=lambda item: -item[1][0]):
        least = least_square(progress, first, last, affected, n)
        for limit_s in (np.inf, whole[0]):
            again = estimate_from(
                this.costs, moved, progress, first, last, affected, op + 1, limit_s
            )
            assert again == whole
        assert least <= whole[2] * (1 + 1e-9)
        assert estimate(this.costs, moved, progress, first, last, whole[0]) == whole
        below_s = estimate_from(
            this.costs, moved, progress, first, last, affected, op + 1, whole[0] * 0.9
        )[0]
        assert below_s in {whole[0], np.inf}


def test_an_estimate_ends_where_its_limit_is_passed() -> None:
    this = problem(chain(100), devices(10**6, 10**6))
    progress = make_progress(this.costs)
    device_of = np.zeros(100, dtype=np.int64)
    refresh(this.costs, device_of, progress)
    set_checkpoints(this.costs, device_of, progress, 40, 60)
    moved = device_of.copy()
    moved[50] = 1
    # There and back takes two more seconds than the 100 of the chain.
    assert estimate(this.costs, moved, progress, 50, 50, 101.9)[0] == np.inf
    for limit_s, expected_s in ((101.9, np.inf), (102.0, 102.0)):
        estimated_s, _, _ = estimate_from(this.costs, moved, progress, 40, 60, 49, 51, limit_s)
        assert estimated_s == expected_s
