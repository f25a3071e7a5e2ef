"""Sizes of tensors that may be symbols: equality, products and quotients, without guards.

Comparing two of torch's symbolic integers by ``==`` writes down a promise that they are equal.
Here their expressions are compared instead, so that a question changes nothing.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

import sympy
import torch

__all__ = ["Extent", "extent", "extents", "product", "quotient", "strides"]

Extent: TypeAlias = int | sympy.Expr
"""A number of elements: known, or an expression in the symbols of a dynamic export."""


def extent(size: int | torch.SymInt) -> Extent:
    """Return a size as a number where it is one, else as its expression."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_Integer else cast("sympy.Expr", expression)
    return int(size)


def extents(shape: Sequence[int | torch.SymInt]) -> tuple[Extent, ...]:
    """Return `extent` of every dimension."""
    return tuple(extent(size) for size in shape)


def product(factors: Iterable[Extent]) -> Extent:
    """Return the product, 1 of none."""
    found: Extent = 1
    for factor in factors:
        found = found * factor
    return _plain(found)


def strides(sizes: Sequence[Extent]) -> list[Extent]:
    """Return how many elements lie between neighbours of each dimension of a dense tensor."""
    found: list[Extent] = []
    step: Extent = 1
    for size in reversed(sizes):
        found.append(step)
        step = _plain(step * size)
    return found[::-1]


def quotient(above: Extent, below: Extent) -> Extent | None:
    """Return ``above / below`` where that is whole whatever the symbols are, else None."""
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
