"""The launch time is judged by the runs that it changes."""

import pytest

from benchmarks.truth.fit_host import errors_of, limited_by_host
from benchmarks.truth.row import Row


def _row(predicted: float, measured: float = 10.0) -> Row:
    return Row("a run", predicted, measured, "ms", held_out=True)


def test_only_runs_that_a_longer_launch_slows_down_are_counted() -> None:
    fast = [_row(10), _row(10), _row(10)]
    slow = [_row(10.9), _row(11.1), _row(8.9)]  # the last is a rate
    assert limited_by_host(fast, slow) == [1, 2]


def test_far_predictions_and_the_mean_error() -> None:
    outside, mean = errors_of([_row(7.4), _row(7.6), _row(13.2), _row(13.4), _row(10)])
    assert outside == 2
    assert mean == pytest.approx((0.3011 + 0.2744 + 0.2776 + 0.2927 + 0) / 5, abs=1e-4)
