"""Axes and the order of values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.report.scale import as_number, in_order, scale_of, tick_text

FLOATS = st.floats(0, 1e9, allow_subnormal=False).filter(lambda value: value == 0 or value > 1e-6)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_all_values_and_all_ticks_are_on_the_axis(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 <= scale.at(value) <= 1 for value in values)
    ticks = scale.ticks(5)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 20
    assert all(-1e-6 <= scale.at(tick) <= 1 + 1e-6 for tick in ticks)


def test_what_is_far_apart_gets_a_logarithmic_axis() -> None:
    wide, narrow = scale_of([1.0, 64.0]), scale_of([900.0, 1200.0])
    assert (wide.log, narrow.log) == (True, False)
    assert wide.at(8.0) == pytest.approx(0.5)
    assert wide.ticks(5) == [1, 2, 5, 10, 20, 50]
    assert narrow.ticks(3) == [900, 1000, 1100, 1200]
    assert scale_of([0.0, 64.0]).log is False


@pytest.mark.parametrize(
    ("best", "order"),
    [
        ({"16": 1.0, "2": 3.0, "1e1": 2.0}, ["2", "1e1", "16"]),
        ({"16x16gb": 1.0, "2x80gb": 2.0, "2x16gb": 9.0}, ["2x16gb", "2x80gb", "16x16gb"]),
        ({"single": None, "kl_based": 2.0, "optimal": 1.0}, ["optimal", "kl_based", "single"]),
        ({"none": 1.0, "1f1b": 2.0}, ["none", "1f1b"]),
    ],
)
def test_the_order_of_values(best: dict[str, float | None], order: list[str]) -> None:
    assert in_order(best) == order


def test_numbers_as_text() -> None:
    assert [as_number(text) for text in ("8", "1e3", "nan", "inf", "x", "")] == [
        8,
        1e3,
        *[None] * 4,
    ]
    assert [tick_text(value) for value in (1250.0, 0.5, 12.0)] == ["1,250", "0.5", "12"]
