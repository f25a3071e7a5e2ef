"""A maximum of polynomials as text, as LaTeX and as a sympy expression."""

from typing import TYPE_CHECKING

from fxpart.graph import FloatArray, IntArray

if TYPE_CHECKING:
    import sympy

__all__ = ["as_latex", "as_sympy", "as_text"]

_TERMS = 3
_NEXT = "\\\\\n& "
_BREAK = "\\\\\n&\\quad "
_FUNCTION = {
    "bytes": r"\mathrm{bytes}",
    "s": r"\mathrm{seconds}",
    "FLOP": r"\mathrm{FLOPs}",
}


def as_text(symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray) -> str:
    """Return ``max(...)`` with a line for each row, as Python reads it; one row stands alone.

    Whole numbers are exact, others have six digits.
    """
    products = ["*".join(_powers(symbols, row, "**{}")) for row in exponents.tolist()]
    lines = [" ".join(_terms(row, products, "*")) for row in rows.tolist()]
    return lines[0] if len(lines) == 1 else "max(\n  " + ",\n  ".join(lines) + ",\n)"


def as_latex(
    symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray, unit: str
) -> str:
    """Return an ``align*`` of amsmath; a row is broken after each `_TERMS` terms, to fit a page."""
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


def as_sympy(
    symbols: tuple[str, ...], exponents: IntArray, rows: IntArray | FloatArray
) -> "sympy.Expr":
    """Return the maximum as sympy writes it; the symbols are positive integers.

    It is not evaluated: to compare some fifty polynomials sympy takes minutes.
    """
    import sympy

    named = [sympy.Symbol(name, integer=True, positive=True) for name in symbols]
    products = [
        sympy.Mul(*(symbol**power for symbol, power in zip(named, row, strict=True)))
        for row in exponents.tolist()
    ]
    found = [
        sympy.Add(*(sympy.sympify(c) * p for c, p in zip(row, products, strict=True) if c))
        for row in rows.tolist()
    ]
    return found[0] if len(found) == 1 else sympy.Max(*found, evaluate=False)


def _powers(names: tuple[str, ...], exponents: list[int], raised: str) -> list[str]:
    """Return the factors of a monomial."""
    return [
        name if power == 1 else name + raised.format(power)
        for name, power in zip(names, exponents, strict=True)
        if power
    ]


def _terms(row: list[int] | list[float], products: list[str], times: str) -> list[str]:
    """Return coefficients times products, each with its sign; those that are zero left out."""
    found: list[str] = []
    for coefficient, product in zip(row, products, strict=True):
        if not coefficient:
            continue
        size = abs(coefficient)
        number = str(size) if isinstance(size, int) else _decimal(size, times)
        term = product if product and size == 1 else times.join(filter(None, (number, product)))
        plus, minus = ("+ ", "- ") if found else ("", "-")
        found.append((minus if coefficient < 0 else plus) + term)
    return found or ["0"]


def _decimal(number: float, times: str) -> str:
    """Return six digits; with a power of ten as LaTeX writes it, where `times` is LaTeX's."""
    plain = f"{number:.6g}"
    mantissa, _, power = plain.partition("e")
    return plain if not power or times == "*" else rf"{mantissa} \cdot 10^{{{int(power)}}}"


def _escaped(name: str) -> str:
    return name.replace("_", r"\_")
