"""Exact polynomials through points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.capture.symbolic.polynomials import Point, fitted, grid
from fxpart.errors import CaptureError


def _columns(
    rows: Sequence[Mapping[Any, int]], points: list[Point]
) -> dict[Point, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the values of each polynomial, by exponents, at the points."""
    columns = {}
    for point in points:
        numbers = [
            sum(c * int(np.prod([x**e for x, e in zip(point, powers, strict=True)]))
                for powers, c in row.items())
            for row in rows
        ]  # fmt: skip
        columns[point] = np.array(numbers, dtype=np.int64)
    return columns


def test_two_symbols_are_distinguished() -> None:
    rows = [{(0, 0): 4}, {(1, 0): 3, (0, 1): -5}, {(1, 2): 7, (0, 0): 1}, {(1, 1): 2, (2, 2): 9}]
    points = [*grid((5, 11)), (1, 2), (64, 64)]
    exponents, table = fitted(_columns(rows, points), (5, 11), "bytes", "abcd")
    for row, numbers in zip(rows, table.tolist(), strict=True):
        coefficients = {tuple(e): c for e, c in zip(exponents.tolist(), numbers, strict=True) if c}
        assert coefficients == row


@given(st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=3), st.integers(1, 5000))
def test_every_polynomial_is_recovered(coefficients: list[int], start: int) -> None:
    row = {(power,): c for power, c in enumerate(coefficients)}
    exponents, table = fitted(_columns([row], grid((start,))), (start,), "bytes", "a")
    assert exponents.tolist() == [[0], [1], [2]]
    assert table.tolist() == [coefficients]


@pytest.mark.parametrize(
    "size",
    [lambda b: b**3, lambda b: b * (b + 1) // 2, lambda b: max(b, 8), lambda b: 2 * (b // 2)],
)
def test_a_size_that_is_no_integer_polynomial_is_refused(size: Callable[[int], int]) -> None:
    points = [*grid((5,)), (1,), (64,)]
    columns = {p: np.array([0, size(p[0])]) for p in points}
    with pytest.raises(CaptureError, match="bytes of second is not a polynomial"):
        fitted(columns, (5,), "bytes", ["first", "second"])
