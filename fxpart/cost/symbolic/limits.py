"""The largest batch that fits given devices, and the memory that a given batch needs.

Both are computed from the peak formulas, without another capture or placement.
"""

from collections.abc import Sequence

from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.errors import InfeasibleError, SpecError, show_unequal_bytes

__all__ = ["MOST", "largest", "largest_batch", "smallest_memory"]

MOST = 2**20
"""Default upper limit of the search for the largest size."""

_Polynomial = list[int | float]


def smallest_memory(formulas: Sequence[MaxFormula], **sizes: int) -> tuple[int, ...]:
    """Return the memory that each device needs at the given sizes, such as ``batch=8``.

    Raises:
        SpecError: if a symbol is unknown or missing, a size is not an integer in its range, or a
            formula is not in bytes.

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
    """Return the largest batch that fits: `largest` for the symbol ``batch``."""
    return largest(formulas, memory_bytes, symbol="batch", most=most, **fixed)


def largest(
    formulas: Sequence[MaxFormula],
    memory_bytes: int | Sequence[int],
    *,
    symbol: str,
    most: int = MOST,
    **fixed: int,
) -> int:
    """Return the largest size of `symbol`, up to `most`, at which every device has enough memory.

    `formulas` are the peaks of the devices, `memory_bytes` the memory of each (or of all), `fixed`
    the sizes of the other symbols. Non-decreasing peaks are bisected exactly. If a peak decreases
    somewhere (no captured model has one) all sizes are tried, and smaller sizes than the result may
    not fit. The result is `most` if memory is not the limit.

    Raises:
        InfeasibleError: if no size fits; it has the bytes needed by the smallest size.
        SpecError: if a symbol is unknown, missing, or both free and fixed, a size is not an integer
            in its range, the number of memories and formulas differs, or a formula is not in bytes.

    """
    limits = _check(formulas, memory_bytes)
    peaks = [formula.row_polynomials(symbol, fixed) for formula in formulas]
    smallest, last = formulas[0].range_of(symbol)
    last = most if last is None else min(most, last)
    if last < smallest:
        raise SpecError(f"most={most} must be {smallest} or more")
    rows = [(row, limit) for peak, limit in zip(peaks, limits, strict=True) for row in peak]
    size = _largest(rows, smallest, last)
    if size < smallest:
        raise _nothing_fits(peaks, limits, symbol, smallest)
    return size


def _check(formulas: Sequence[MaxFormula], memory_bytes: int | Sequence[int] = 0) -> list[int]:
    """Return the memory of each device after checking the formulas."""
    if not formulas:
        raise SpecError("no formulas: give the peak of at least one device")
    other_units = [formula.unit for formula in formulas if formula.unit != "bytes"]
    if other_units:
        raise SpecError(f"memory needs formulas in bytes, got one in {other_units[0]}")
    limits = [memory_bytes] * len(formulas) if isinstance(memory_bytes, int) else list(memory_bytes)
    if len(limits) != len(formulas):
        raise SpecError(
            f"{len(formulas)} devices have formulas and {len(limits)} have memory; give one of each"
        )
    return [int(limit) for limit in limits]


def _largest(rows: list[tuple[_Polynomial, int]], smallest_size: int, largest_size: int) -> int:
    """Return the largest size at which no row exceeds its limit; less than `smallest_size` if none.

    Python integers are used, which cannot overflow.
    """
    if not all(_never_falls(row) for row, _ in rows):
        return next(
            (size for size in range(largest_size, smallest_size - 1, -1) if _fits(rows, size)),
            smallest_size - 1,
        )
    low, high = smallest_size - 1, largest_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(rows, middle) else (low, middle)
    return low


def _never_falls(row: _Polynomial) -> bool:
    """Return whether a polynomial is certainly non-decreasing from 1 on.

    The test is that in y = x - 1 (by Horner's rule, one power at a time) it has no negative
    coefficient except the constant.
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
    """Return the error for the device with the largest shortage."""
    needed = [int(max(_value(row, size) for row in peak)) for peak in peaks]
    short = [need - limit for need, limit in zip(needed, limits, strict=True)]
    device = short.index(max(short))
    needs, has = show_unequal_bytes(needed[device], limits[device])
    message = (
        f"no {symbol} fits: {symbol}={size} needs {needs} on device {device}, which has {has};"
        " use larger or more devices"
    )
    return InfeasibleError(message, needed_bytes=needed[device], available_bytes=limits[device])
