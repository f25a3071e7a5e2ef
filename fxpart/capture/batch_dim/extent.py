"""`Extent`: sizes that may be symbolic, with products and quotients that add no guards.

Comparing two of torch's symbolic integers by ``==`` records a guard that they are equal. Here their
expressions are compared instead.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

import sympy
import torch

__all__ = ["Extent", "extent", "extents", "product", "quotient", "strides"]

Extent: TypeAlias = int | sympy.Expr
"""A number of elements: an integer, or an expression in the symbols of a dynamic export."""


def extent(size: int | torch.SymInt) -> Extent:
    """Return a size as a number, or as its expression if it is symbolic."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_Integer else cast("sympy.Expr", expression)
    return int(size)


def extents(shape: Sequence[int | torch.SymInt]) -> tuple[Extent, ...]:
    """Return `extent` of every dimension."""
    return tuple(extent(size) for size in shape)


def product(factors: Iterable[Extent]) -> Extent:
    """Return the product, 1 if empty."""
    result: Extent = 1
    for factor in factors:
        result = result * factor
    return _plain(result)


def strides(sizes: Sequence[Extent]) -> list[Extent]:
    """Return the strides of a dense tensor, in elements."""
    result: list[Extent] = []
    step: Extent = 1
    for size in reversed(sizes):
        result.append(step)
        step = _plain(step * size)
    return result[::-1]


def quotient(above: Extent, below: Extent) -> Extent | None:
    """Return ``above / below`` if it is an integer for all values of the symbols, else None."""
    if isinstance(above, int) and isinstance(below, int):
        return above // below if below and above % below == 0 else None
    return _symbolic_quotient(sympy.sympify(above), sympy.sympify(below))


@lru_cache(maxsize=65536)
def _symbolic_quotient(above: sympy.Expr, below: sympy.Expr) -> Extent | None:
    if below == 0:
        return None
    ratio = sympy.cancel(above / below)
    return _plain(ratio) if sympy.fraction(ratio)[1] == 1 else None


def _plain(value: Extent) -> Extent:
    if isinstance(value, int):
        return value
    return int(value) if value.is_Integer else sympy.expand(value)
