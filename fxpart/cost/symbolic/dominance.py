"""Which of several polynomials can be the largest anywhere, when all symbols are 1 or more."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled

__all__ = ["from_one", "undominated"]

_ROUNDING = 1e-12
"""Float rows that differ by less than this share of themselves are the same."""
_MOST = float(2**62)


def from_one(exponents: IntArray) -> IntArray:
    """Return the matrix that takes coefficients in x to those in y = x - 1, for every symbol.

    Shape (M, M'): x to the power of e is the sum of binomial(e, j) times y to the power of j.
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
    """Return the rows that may be the largest at some size, each once; `rows` has shape (R, M).

    Row r is left out when there is a row s such that s - r, written in y = x - 1, has no negative
    coefficient: then s is at least r wherever each symbol is 1 or more. The test is sufficient and
    not necessary, so that some rows may stay that are never the largest. It sees more than a
    comparison of the coefficients in x: 2 x is at least x + 1. In one symbol and no higher power
    than the first what stays is just the upper envelope. O(R^2 M') at most.
    """
    kept = np.unique(rows, axis=0)
    shift = from_one(exponents)
    safe = np.abs(kept).astype(np.float64) @ shift < _MOST
    # Without the shift, coefficients that are all at least as large are sufficient too.
    shifted = kept @ shift if safe.all() else kept
    # A row never dominates one of larger sum, so what dominates it comes before it.
    order = np.argsort(-shifted.sum(axis=1), kind="stable")
    rounding = _ROUNDING if np.issubdtype(kept.dtype, np.floating) else 0.0
    stays = order[_first_above(shifted[order], rounding)]
    if safe.all() and shifted.shape[1] == 2:
        stays = stays[_upper_envelope(shifted[stays].tolist())]
    return kept[np.sort(stays)]


@compiled
def _first_above(rows: npt.NDArray[Any], rounding: float) -> IntArray:
    """Return the rows that no row before them exceeds in all columns, `rounding` aside."""
    kept = np.empty(rows.shape[0], dtype=np.int64)
    count = 0
    for row in range(rows.shape[0]):
        dominated = False
        for i in range(count):
            above = True
            for column in range(rows.shape[1]):
                short = rows[row, column] - rows[kept[i], column]
                if short > 0 and short >= rounding * abs(rows[row, column]):
                    above = False
                    break
            if above:
                dominated = True
                break
        if not dominated:
            kept[count] = row
            count += 1
    return kept[:count]


def _upper_envelope(lines: list[list[int]]) -> list[int]:
    """Return which lines ``a + b y`` are the largest for some y >= 0; none dominates another.

    Andrew's monotone chain: between its neighbours a line must lie above where those cross.
    """
    # The constant falls while the slope grows, since no line dominates another.
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
