"""The earliest start of an operator, given when its ancestors' results can arrive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cost.bounds import AncestorScratch, _earliest_start

_TIMES = st.floats(0.0, 9.0)


def _by_all_splits(
    start_s: list[float], time_s: list[float], arrival_s: list[float], at_least_s: float
) -> float:
    """Return the minimum over how many of the latest arrivals are on the operator's own device."""
    latest = sorted(range(len(start_s)), key=lambda k: -arrival_s[k])
    best = np.inf
    for local in range(len(latest) + 1):
        done_s = 0.0
        for k in sorted(latest[:local], key=lambda k: start_s[k]):
            done_s = max(done_s, start_s[k]) + time_s[k]
        others_s = arrival_s[latest[local]] if local < len(latest) else 0.0
        best = min(best, max(done_s, others_s))
    return max(best, at_least_s)


@given(st.lists(st.tuples(_TIMES, _TIMES, _TIMES, _TIMES), min_size=1, max_size=9), _TIMES)
def test_it_is_that_of_the_best_split(
    ancestors: list[tuple[float, float, float, float]], at_least_s: float
) -> None:
    # Operators are numbered in the order of their start, and ancestors come latest first.
    ancestors = sorted(ancestors)
    start_s, time_s, path_s, cross_s = (list(column) for column in zip(*ancestors, strict=True))
    arrival_s = [sum(ancestor) for ancestor in ancestors]
    order = np.arange(len(ancestors))[::-1].copy()
    scratch = AncestorScratch(order, np.array(path_s)[order], np.array(cross_s)[order])
    found = _earliest_start(np.array(start_s), np.array(time_s), scratch, len(order), at_least_s)
    expected = _by_all_splits(start_s, time_s, arrival_s, at_least_s)
    assert found == pytest.approx(expected, rel=1e-12)


def test_late_results_that_are_computed_here_in_time_delay_nothing() -> None:
    # From another device they arrive at 7 and 9; on this one all are done at 4, or at 6.
    scratch = AncestorScratch(np.array([1, 0]), np.array([0.0, 0.0]), np.array([5.0, 5.0]))
    start_s, time_s = np.array([0.0, 2.0]), np.array([2.0, 2.0])
    assert _earliest_start(start_s, time_s, scratch, 2, 4.0) == 4.0
    assert _earliest_start(start_s, np.array([4.0, 2.0]), scratch, 2, 4.0) == 6.0
