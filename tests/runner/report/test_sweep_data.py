"""Settings of a sweep: their values in order."""

import pytest

from runner.report.sweep_data import as_number, in_order


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
    texts = ("8", "1e3", "nan", "inf", "x", "")
    assert [as_number(text) for text in texts] == [8, 1e3, None, None, None, None]
