"""Scales and their ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.output.plot import Scale, scale_of, tick_text

FLOATS = st.floats(0, 1e9, allow_subnormal=False).filter(lambda value: value == 0 or value > 1e-6)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_all_values_and_all_ticks_are_on_the_axis(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 <= scale.at(value) <= 1 for value in values)
    ticks = scale.ticks(5)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 20
    assert all(-1e-6 <= scale.at(tick) <= 1 + 1e-6 for tick in ticks)


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    wide, narrow = scale_of([1.0, 64.0]), scale_of([900.0, 1200.0])
    assert (wide.log, narrow.log) == (True, False)
    assert wide.at(8.0) == pytest.approx(0.5)
    assert wide.ticks(5) == [1, 2, 5, 10, 20, 50]
    assert narrow.ticks(3) == [900, 1000, 1100, 1200]
    assert scale_of([0.0, 64.0]).log is False


def test_a_scale_from_zero_has_round_numbers_up_to_its_end() -> None:
    assert Scale(0.0, 9000.0).ticks(8) == [1000.0 * count for count in range(10)]
    assert Scale(0.0, 220.0).ticks(3) == [0, 50, 100, 150, 200]
    assert Scale(0.0, 0.3).ticks(6) == [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]


def test_numbers_as_text() -> None:
    assert [tick_text(value) for value in (1250.0, 0.5, 12.0)] == ["1,250", "0.5", "12"]
