"""`fitted`: fit exact integer polynomials to given points."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.errors import CaptureError

__all__ = ["DEGREE", "Point", "fitted", "grid"]

DEGREE = 2
"""Highest power of a symbol, since attention scores are quadratic in positions."""

Point = tuple[int, ...]
"""A value for each symbol."""


def grid(start: Sequence[int]) -> list[Point]:
    """Return points that determine a polynomial: `DEGREE` + 1 values of each symbol."""
    return list(product(*(range(low, low + DEGREE + 1) for low in start)))


def fitted(
    columns: Mapping[Point, IntArray], start: Sequence[int], what: str, names: Sequence[str]
) -> tuple[IntArray, IntArray]:
    """Return ``(exponents, coefficients)`` of the polynomials that give `columns` at each point.

    Shapes (M, symbols) and (rows, M): all monomials up to `DEGREE` in each symbol. Exact, by
    rational arithmetic.

    Args:
        columns: a number for each row, at the points of ``grid(start)`` and any others.
        start: the smallest value of each symbol in the grid.
        what: description of the numbers, for messages.
        names: names of the rows, for messages.

    Raises:
        CaptureError: if a row is not an integer polynomial of that degree at all points, or a
            coefficient exceeds an int64.

    """
    points = list(columns)
    table = np.stack([columns[point] for point in points], axis=1)
    kinds, first, kind_of = np.unique(table, axis=0, return_index=True, return_inverse=True)
    exponents = list(product(range(DEGREE + 1), repeat=len(start)))
    bases = [_lagrange(low) for low in start]
    inside = [points.index(point) for point in grid(start)]
    rows: list[list[int]] = []
    for kind, row in zip(kinds.tolist(), first.tolist(), strict=True):
        coefficients = _coefficients([kind[position] for position in inside], bases, exponents)
        if coefficients is None or not _agrees(coefficients, exponents, points, kind):
            raise CaptureError(
                f"{what} of {names[row]} is not a polynomial of the symbolic sizes; set "
                "capture.symbolic=none"
            )
        rows.append(coefficients)
    return np.array(exponents, dtype=np.int64), np.array(rows, dtype=np.int64)[kind_of.ravel()]


def _lagrange(low: int) -> list[list[Fraction]]:
    """Return the coefficients of the Lagrange basis polynomial of each value from `low`."""
    values = range(low, low + DEGREE + 1)
    bases = []
    for node in values:
        polynomial = [Fraction(1)]
        for other in values:
            if other == node:
                continue
            # Multiply by (x - other) / (node - other).
            shifted = [Fraction(0), *polynomial]
            scaled = [*(-other * c for c in polynomial), Fraction(0)]
            polynomial = [(a + b) / (node - other) for a, b in zip(shifted, scaled, strict=True)]
        bases.append(polynomial)
    return bases


def _coefficients(
    numbers: Sequence[int],
    bases: Sequence[list[list[Fraction]]],
    exponents: Sequence[tuple[int, ...]],
) -> list[int] | None:
    """Return the coefficient of each monomial, or None if one is not an int64."""
    corners = list(product(range(DEGREE + 1), repeat=len(bases)))
    coefficients: list[int] = []
    for powers in exponents:
        total = Fraction(0)
        for corner, number in zip(corners, numbers, strict=True):
            weight = Fraction(number)
            for base, position, power in zip(bases, corner, powers, strict=True):
                weight *= base[position][power]
            total += weight
        if total.denominator != 1 or abs(total) >= 2**63:
            return None
        coefficients.append(int(total))
    return coefficients


def _agrees(
    coefficients: Sequence[int],
    exponents: Sequence[tuple[int, ...]],
    points: Sequence[Point],
    numbers: Sequence[int],
) -> bool:
    for point, number in zip(points, numbers, strict=True):
        total = 0
        for coefficient, powers in zip(coefficients, exponents, strict=True):
            term = coefficient
            for value, power in zip(point, powers, strict=True):
                term *= value**power
            total += term
        if total != number:
            return False
    return True
