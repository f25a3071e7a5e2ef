"""`MaxFormula`: the maximum of polynomials, such as the peak of a device in the batch size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.symbolic.dominance import undominated
from fxpart.errors import SpecError, nearest_names

if TYPE_CHECKING:
    import sympy

__all__ = ["MaxFormula", "max_formula"]


# A maximum of polynomials as text, LaTeX, and a sympy expression.

_TERMS = 3
_NEXT = "\\\\\n& "
_BREAK = "\\\\\n&\\quad "
_FUNCTION = {
    "bytes": r"\mathrm{bytes}",
    "s": r"\mathrm{seconds}",
    "FLOP": r"\mathrm{FLOPs}",
}


def _as_text(symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray) -> str:
    """Return ``max(...)`` as a Python expression with a line per row, or just the only row.

    Integers are exact; other numbers have six digits.
    """
    products = ["*".join(_powers(symbols, row, "**{}")) for row in exponents.tolist()]
    lines = [" ".join(_terms(row, products, "*")) for row in rows.tolist()]
    return lines[0] if len(lines) == 1 else "max(\n  " + ",\n  ".join(lines) + ",\n)"


def _as_latex(
    symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray, unit: str
) -> str:
    """Return an amsmath ``align*``; rows are broken after every `_TERMS` terms to fit a page."""
    names = tuple(rf"\mathrm{{{_escaped(name)}}}" for name in symbols)
    products = [r"\,".join(_powers(names, row, "^{{{}}}")) for row in exponents.tolist()]
    lines = [_BREAK.join(_broken(row, products)) for row in rows.tolist()]
    head = f"{_FUNCTION[unit]}({', '.join(names)})"
    if len(lines) == 1:
        body = f"{head} &= {lines[0]}"
    else:
        body = f"{head} = \\max\\{{\\;& {(', ' + _NEXT).join(lines)} \\;\\}}"
    return f"\\begin{{align*}}\n{body}\n\\end{{align*}}"


def _broken(row: list[int] | list[float], products: list[str]) -> list[str]:
    terms = _terms(row, products, r"\,")
    return [" ".join(terms[i : i + _TERMS]) for i in range(0, len(terms), _TERMS)]


def _as_sympy(
    symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray
) -> "sympy.Expr":
    """Return the maximum as a sympy expression; the symbols are positive integers.

    It is not evaluated, since comparing some fifty polynomials takes sympy minutes.
    """
    import sympy

    named = [sympy.Symbol(name, integer=True, positive=True) for name in symbols]
    products = [
        sympy.Mul(*(symbol**power for symbol, power in zip(named, row, strict=True)))
        for row in exponents.tolist()
    ]
    polynomials = [
        sympy.Add(*(sympy.sympify(c) * p for c, p in zip(row, products, strict=True) if c))
        for row in rows.tolist()
    ]
    return polynomials[0] if len(polynomials) == 1 else sympy.Max(*polynomials, evaluate=False)


def _powers(names: tuple[str, ...], exponents: list[int], raised: str) -> list[str]:
    """Return the factors of a monomial."""
    return [
        name if power == 1 else name + raised.format(power)
        for name, power in zip(names, exponents, strict=True)
        if power
    ]


def _terms(row: list[int] | list[float], products: list[str], times: str) -> list[str]:
    """Return the signed terms of a polynomial, leaving out zero coefficients."""
    terms: list[str] = []
    for coefficient, product in zip(row, products, strict=True):
        if not coefficient:
            continue
        size = abs(coefficient)
        number = str(size) if isinstance(size, int) else _decimal(size, times)
        term = product if product and size == 1 else times.join(filter(None, (number, product)))
        plus, minus = ("+ ", "- ") if terms else ("", "-")
        terms.append((minus if coefficient < 0 else plus) + term)
    return terms or ["0"]


def _decimal(number: float, times: str) -> str:
    """Return six digits, with powers of ten in LaTeX notation unless `times` is ``*``."""
    plain = f"{number:.6g}"
    mantissa, _, power = plain.partition("e")
    return plain if not power or times == "*" else rf"{mantissa} \cdot 10^{{{int(power)}}}"


def _escaped(name: str) -> str:
    return name.replace("_", r"\_")


UNITS = ("bytes", "s", "FLOP")
_MOST = float(2**63)


@dataclass(frozen=True, eq=False, slots=True)
class MaxFormula:
    """The maximum of R polynomials in k symbols, which are integers of at least 1.

    Build it with `max_formula`, which also drops rows that are never the maximum.
    """

    symbols: tuple[str, ...]
    """Names, such as ``("batch", "seq_len")``. Length k."""
    exponents: IntArray
    """Shape (M, k): monomial m is the product of the symbols raised to these powers."""
    rows: IntArray | FloatArray
    """Coefficients of each polynomial, shape (R, M): int64 for bytes, float64 for seconds."""
    unit: str
    """``bytes``, ``s`` or ``FLOP``."""
    ranges: tuple[tuple[int, int | None], ...] = field(default=())
    """Smallest and largest valid value of each symbol; None for no upper limit. Empty: any value
    from 1."""

    def __post_init__(self) -> None:
        """Check that the unit exists and the shapes are consistent."""
        if self.unit not in UNITS:
            raise SpecError(f"unit={self.unit} of a formula; {nearest_names(self.unit, UNITS)}")
        if self.exponents.ndim != 2 or self.exponents.shape[1] != len(self.symbols):
            raise SpecError(
                f"a formula in {len(self.symbols)} symbols needs as many exponents a monomial, got"
                f" shape {self.exponents.shape}"
            )
        if len(self.ranges) not in {0, len(self.symbols)}:
            raise SpecError("a formula must say the range of each symbol, or of none")
        if self.rows.ndim != 2 or self.rows.shape[1] != len(self.exponents) or not len(self.rows):
            raise SpecError(
                f"a formula of {len(self.exponents)} monomials needs one row or more of as many"
                f" coefficients, got shape {self.rows.shape}"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the coefficients are integers."""
        return bool(np.issubdtype(self.rows.dtype, np.integer))

    def range_of(self, symbol: str) -> tuple[int, int | None]:
        """Return the smallest and largest value of `symbol`; None for no upper limit.

        Raises:
            SpecError: if the symbol is unknown.

        """
        if symbol not in self.symbols:
            raise SpecError(f"{symbol} is not symbolic here; {nearest_names(symbol, self.symbols)}")
        return self.ranges[self.symbols.index(symbol)] if self.ranges else (1, None)

    def at(self, **sizes: npt.ArrayLike) -> npt.NDArray[Any]:
        """Evaluate the formula at arrays of sizes, one per symbol, which are broadcast.

        The result is int64 for bytes and float64 for seconds. O(R M) per size.

        Raises:
            SpecError: if a symbol is unknown or missing, a size is not an integer in its symbol's
                range, or the result overflows int64.

        """
        columns = np.broadcast_arrays(
            *(self._column(name, sizes[name]) for name in self._known(sizes))
        )
        flat = np.stack([column.ravel() for column in columns])
        # In float first, since int64 overflows silently.
        powers = np.prod(flat[None].astype(np.float64) ** self.exponents[:, :, None], axis=1)
        largest: npt.NDArray[Any]
        if self.is_exact:
            if (np.abs(self.rows).astype(np.float64) @ powers).max(initial=0.0) >= _MOST:
                raise SpecError("the formula is more than an int64 holds; choose smaller sizes")
            largest = self.rows @ np.prod(flat[None] ** self.exponents[:, :, None], axis=1)
        else:
            largest = self.rows @ powers
        result: npt.NDArray[Any] = largest.max(axis=0).reshape(columns[0].shape)
        return result

    def row_polynomials(self, symbol: str, fixed: Mapping[str, int]) -> list[list[int | float]]:
        """Return each row as a polynomial in one symbol (coefficients from power 0), others fixed.

        The coefficients are Python numbers, exact at any size.

        Raises:
            SpecError: if a symbol is unknown, missing, or both free and fixed.

        """
        if symbol in fixed:
            raise SpecError(f"{symbol} is asked for, so it cannot be given; leave out {symbol}=")
        self._known({**fixed, symbol: 1})
        values = {name: int(self._column(name, size)) for name, size in fixed.items()}
        free = self.symbols.index(symbol)
        polynomials = []
        for row in self.rows.tolist():
            powers: list[int | float] = [0] * (int(self.exponents[:, free].max(initial=0)) + 1)
            for coefficient, exponents in zip(row, self.exponents.tolist(), strict=True):
                named = zip(self.symbols, exponents, strict=True)
                rest = math.prod(values[name] ** e for name, e in named if name != symbol)
                powers[exponents[free]] += coefficient * rest
            polynomials.append(powers)
        return polynomials

    def _known(self, sizes: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the symbols after checking that `sizes` has exactly those."""
        for name in sizes:
            self.range_of(name)
        for name in self.symbols:
            if name not in sizes:
                raise SpecError(f"a size of {name} is missing; give one for each symbol")
        return self.symbols

    def _column(self, name: str, size: npt.ArrayLike) -> IntArray:
        """Return sizes as int64 after checking that they are integers in the symbol's range."""
        column, (lower, upper) = np.asarray(size), self.range_of(name)
        if not np.issubdtype(column.dtype, np.integer):
            raise SpecError(f"{name} must be a whole number, 1 or more, got {column.dtype} numbers")
        low, high = (int(column.min()), int(column.max())) if column.size else (lower, lower)
        if low < 1:
            raise SpecError(f"{name}={low} must be a whole number, 1 or more")
        if low < lower or (upper is not None and high > upper):
            wrong, limit = (low, f"{lower} or more") if low < lower else (high, f"{upper} or less")
            raise SpecError(f"{name}={wrong} is outside what was captured; choose {limit}")
        return column.astype(np.int64)

    def text(self) -> str:
        """Return the formula as text with a line per row: ``max(10 + 4*batch, ...)``."""
        return _as_text(self.symbols, self.exponents, self.rows)

    def latex(self) -> str:
        r"""Return the formula as an ``align*`` of LaTeX's amsmath with a line per row."""
        return _as_latex(self.symbols, self.exponents, self.rows, self.unit)

    def sympy(self) -> "sympy.Expr":
        """Return the formula as a sympy expression with an unevaluated ``Max``."""
        return _as_sympy(self.symbols, self.exponents, self.rows)


def max_formula(
    symbols: tuple[str, ...],
    exponents: IntArray,
    rows: IntArray | FloatArray,
    unit: str,
    ranges: tuple[tuple[int, int | None], ...] = (),
) -> MaxFormula:
    """Return the maximum of `rows`, without dominated rows and unused monomials.

    `exponents` has shape (M, k), `rows` (R, M). Rows are ordered by their growth, the fastest
    first. At most O(R^2 M), and O(R M) if few rows remain.

    Raises:
        SpecError: if the unit does not exist or shapes are inconsistent.

    """
    unreduced = MaxFormula(symbols, exponents, rows, unit, ranges)
    # Sort by degree, so that formulas do not depend on the capture.
    order = np.lexsort([*-exponents.T[::-1], exponents.sum(axis=1)])
    kept_rows = undominated(exponents[order], unreduced.rows[:, order])
    used = kept_rows.any(axis=0)
    order, kept_rows = order[used], kept_rows[:, used]
    # Rows with the largest coefficients of the highest monomials come first.
    sorting = (
        np.lexsort(list(kept_rows.T))[::-1] if kept_rows.shape[1] else np.arange(len(kept_rows))
    )
    return MaxFormula(symbols, exponents[order], kept_rows[sorting], unit, ranges)
