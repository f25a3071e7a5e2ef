"""How large a batch fits given devices, and how much memory a given batch needs.

Both are read off the formulas of the peaks; nothing is captured or placed again.
"""

from collections.abc import Sequence

from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.errors import InfeasibleError, SpecError, show_bytes

__all__ = ["MOST", "largest", "largest_batch", "smallest_memory"]

MOST = 2**20
"""Where the search for a largest size ends, unless told otherwise."""

_Polynomial = list[int | float]


def smallest_memory(formulas: Sequence[MaxFormula], **sizes: int) -> tuple[int, ...]:
    """Return the bytes that each device must have at these sizes, such as ``batch=8``.

    Raises:
        SpecError: for a symbol that is unknown or missing, a size that is no whole number of 1 or
            more, and formulas that are not of bytes.

    """
    _check(formulas)
    return tuple(int(formula.at(**sizes)) for formula in formulas)


def largest_batch(
    formulas: Sequence[MaxFormula],
    memory_bytes: int | Sequence[int],
    *,
    most: int = MOST,
    **fixed: int,
) -> int:
    """Return the largest batch that fits; as `largest` for the symbol ``batch``."""
    return largest(formulas, memory_bytes, symbol="batch", most=most, **fixed)


def largest(
    formulas: Sequence[MaxFormula],
    memory_bytes: int | Sequence[int],
    *,
    symbol: str,
    most: int = MOST,
    **fixed: int,
) -> int:
    """Return the largest size of `symbol` up to `most` at which every device has memory enough.

    `formulas` are the peaks of the devices, `memory_bytes` what each has (or all), `fixed` the
    sizes of the other symbols. A peak that does not fall as the size grows is bisected, exactly;
    where one falls (no captured model's does) all sizes are looked at, and smaller ones may not
    fit. `most` is also the answer where memory sets no limit.

    Raises:
        InfeasibleError: when no size fits, with the bytes that the smallest needs.
        SpecError: for a symbol that is unknown, missing, or both free and fixed, a size that is no
            whole number of 1 or more, memories of another number of devices, and formulas that are
            not of bytes.

    """
    limits = _check(formulas, memory_bytes)
    peaks = [formula.row_polynomials(symbol, fixed) for formula in formulas]
    least, last = formulas[0].range_of(symbol)
    last = most if last is None else min(most, last)
    if last < least:
        raise SpecError(f"most={most} must be {least} or more")
    rows = [(row, limit) for peak, limit in zip(peaks, limits, strict=True) for row in peak]
    size = _largest(rows, least, last)
    if size < least:
        raise _nothing_fits(peaks, limits, symbol, least)
    return size


def _check(formulas: Sequence[MaxFormula], memory_bytes: int | Sequence[int] = 0) -> list[int]:
    """Return the memory of each device, if the formulas are peaks."""
    if not formulas:
        raise SpecError("no formulas: give the peak of at least one device")
    wrong = [formula.unit for formula in formulas if formula.unit != "bytes"]
    if wrong:
        raise SpecError(f"memory needs formulas in bytes, got one in {wrong[0]}")
    each = [memory_bytes] * len(formulas) if isinstance(memory_bytes, int) else list(memory_bytes)
    if len(each) != len(formulas):
        raise SpecError(
            f"{len(formulas)} devices have formulas and {len(each)} have memory; give one of each"
        )
    return [int(limit) for limit in each]


def _largest(rows: list[tuple[_Polynomial, int]], least: int, most: int) -> int:
    """Return the largest size at which no row exceeds its limit; less than `least` if none.

    Bisected in Python's own integers, which cannot overflow.
    """
    if not all(_never_falls(row) for row, _ in rows):
        return next((size for size in range(most, least - 1, -1) if _fits(rows, size)), least - 1)
    low, high = least - 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(rows, middle) else (low, middle)
    return low


def _never_falls(row: _Polynomial) -> bool:
    """Return whether a polynomial surely does not fall from 1 on.

    Written in y = x - 1 (by Horner's rule, one power at a time) it has no negative coefficient but
    the constant.
    """
    shifted = list(row)
    for start in range(len(row)):
        for power in range(len(row) - 2, start - 1, -1):
            shifted[power] += shifted[power + 1]
    return all(coefficient >= 0 for coefficient in shifted[1:])


def _fits(rows: list[tuple[_Polynomial, int]], size: int) -> bool:
    return all(_value(row, size) <= limit for row, limit in rows)


def _value(row: _Polynomial, size: int) -> int | float:
    total: int | float = 0
    for coefficient in reversed(row):
        total = total * size + coefficient
    return total


def _nothing_fits(
    peaks: Sequence[Sequence[_Polynomial]], limits: list[int], symbol: str, size: int
) -> InfeasibleError:
    """Return the refusal that names the device that lacks most."""
    needed = [int(max(_value(row, size) for row in peak)) for peak in peaks]
    short = [need - limit for need, limit in zip(needed, limits, strict=True)]
    device = short.index(max(short))
    message = (
        f"no {symbol} fits: {symbol}={size} needs {show_bytes(needed[device])} on device {device},"
        f" which has {show_bytes(limits[device])}; use larger or more devices"
    )
    return InfeasibleError(message, needed_bytes=needed[device], available_bytes=limits[device])
