"""Find the polynomials that can be the maximum somewhere, for symbols of at least 1."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled

__all__ = ["from_one", "undominated"]

_ROUNDING = 1e-12
"""Relative difference below which float rows count as equal."""
_MOST = float(2**62)


def from_one(exponents: IntArray) -> IntArray:
    """Return the matrix that converts coefficients in x to coefficients in y = x - 1.

    Shape (M, M'): x^e is the sum of binomial(e, j) y^j.
    """
    below = [
        list(itertools.product(*(range(power + 1) for power in row))) for row in exponents.tolist()
    ]
    column = {powers: i for i, powers in enumerate(dict.fromkeys(itertools.chain(*below)))}
    table = np.zeros((len(exponents), len(column)), dtype=np.int64)
    for m, (row, terms) in enumerate(zip(exponents.tolist(), below, strict=True)):
        for powers in terms:
            table[m, column[powers]] = math.prod(map(math.comb, row, powers))
    return table


def undominated(exponents: IntArray, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct rows that may be the maximum at some size; `rows` has shape (R, M).

    Row r is dropped if there is a row s such that s - r, written in y = x - 1, has no negative
    coefficient: then s >= r wherever all symbols are at least 1. The test is sufficient but not
    necessary, so some rows that are never the maximum may remain. It is stronger than comparing
    coefficients in x: 2 x >= x + 1. For polynomials of degree 1 in one symbol the result is exactly
    the upper envelope. At most O(R^2 M').
    """
    distinct = np.unique(rows, axis=0)
    shift = from_one(exponents)
    fits_int64 = np.abs(distinct).astype(np.float64) @ shift < _MOST
    # If the shift might overflow, comparing unshifted coefficients is sufficient too.
    shifted = distinct @ shift if fits_int64.all() else distinct
    # A row never dominates one with a larger sum, so dominating rows come first.
    order = np.argsort(-shifted.sum(axis=1), kind="stable")
    rounding = _ROUNDING if np.issubdtype(distinct.dtype, np.floating) else 0.0
    surviving = order[_first_above(shifted[order], rounding)]
    if fits_int64.all() and shifted.shape[1] == 2:
        surviving = surviving[_upper_envelope(shifted[surviving].tolist())]
    return distinct[np.sort(surviving)]


@compiled
def _first_above(rows: npt.NDArray[Any], rounding: float) -> IntArray:
    """Return the rows not exceeded in all columns by an earlier row, up to `rounding`."""
    undominated_rows = np.empty(rows.shape[0], dtype=np.int64)
    count = 0
    for row in range(rows.shape[0]):
        dominated = False
        for i in range(count):
            above = True
            for column in range(rows.shape[1]):
                short = rows[row, column] - rows[undominated_rows[i], column]
                if short > 0 and short >= rounding * abs(rows[row, column]):
                    above = False
                    break
            if above:
                dominated = True
                break
        if not dominated:
            undominated_rows[count] = row
            count += 1
    return undominated_rows[:count]


def _upper_envelope(lines: list[list[int]]) -> list[int]:
    """Return the lines ``a + b y`` that are the maximum for some y >= 0; none dominates another.

    This is Andrew's monotone chain: a line must be above the intersection of its neighbours.
    """
    # Constants descend as slopes ascend, since no line dominates another.
    order = sorted(range(len(lines)), key=lambda i: lines[i][1])
    hull: list[int] = []
    for new in order:
        while len(hull) >= 2 and _below(lines[hull[-2]], lines[hull[-1]], lines[new]):
            hull.pop()
        hull.append(new)
    return hull


def _below(left: list[int], middle: list[int], right: list[int]) -> bool:
    """Return whether `middle` is nowhere above both others; slopes ascend, constants descend."""
    return (left[0] - right[0]) * (middle[1] - left[1]) <= (left[0] - middle[0]) * (
        right[1] - left[1]
    )
