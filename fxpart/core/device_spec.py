"""Device specs in one word: ``4x16gb``, ``2x80gb+4x16gb``, ``4xa100_80gb``, ``2xh100+4xt4``."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from fxpart.errors import SpecError, nearest_names, show_bytes

__all__ = [
    "DEVICE_GRAMMAR",
    "MAX_DEVICES",
    "MAX_MEMORY_BYTES",
    "PoolSpec",
    "parse_devices",
    "parse_size_bytes",
]

DEVICE_GRAMMAR = (
    "COUNTxSIZE or COUNTxACCELERATOR, joined by +, such as 4x16gb, 2x80gb+4x16gb, 2xh100+4xt4"
)
"""The syntax of a device spec, for messages and help."""

MAX_DEVICES = 1024
"""Most devices in a spec; the link table has a row and a column per device."""

MAX_MEMORY_BYTES = 2**52
"""Most memory of one device, 4503.6 TB: the sum over `MAX_DEVICES` is exact in 64 bits."""
_MOST_DIGITS = 40
"""Most digits of a number in a spec, since parsing takes quadratic time."""

_UNITS = {
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_COUNTED = re.compile(r"(-?\d+)x(.*)")
_NUMBER_FIRST = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))([a-z_]*)")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of equal devices, given by either a memory size or an accelerator's name."""

    count: int
    """Number of devices, at least 1."""
    memory_bytes: int | None
    """Memory per device, if the spec gives a size."""
    accelerator: str | None
    """Name in the table of accelerators, if the spec gives a name."""


def parse_size_bytes(text: str) -> int:
    """Parse a size: ``16gb`` is 16 * 10^9 bytes, ``16gib`` is 16 * 2^30.

    Units are mb, gb, tb, mib, gib, tib in any case. Decimals are exact, and fractions of a byte are
    dropped.

    Raises:
        SpecError: if the number is malformed or too long, the unit is missing or unknown, or the
            size is below one byte or above `MAX_MEMORY_BYTES`.

    """
    match = _NUMBER_FIRST.fullmatch(text.strip().lower())
    if not match:
        raise SpecError(f"size {text!r} is not a number and a unit; write it like 16gb or 1.5gib")
    number, unit = match.groups()
    if len(number) > _MOST_DIGITS:
        raise SpecError(f"size {text[:_MOST_DIGITS]}... has more than {_MOST_DIGITS} digits")
    if Fraction(number) <= 0:
        raise SpecError(f"size {text!r} must be positive")
    if not unit:
        raise SpecError(f"size {text!r} has no unit; {_unit_names()}")
    if unit not in _UNITS:
        raise SpecError(f"size {text!r} has the unknown unit {unit!r}; {_unit_names()}")
    size_bytes = int(Fraction(number) * _UNITS[unit])
    if size_bytes < 1:
        raise SpecError(f"size {text!r} is less than one byte")
    if size_bytes > MAX_MEMORY_BYTES:
        raise SpecError(
            f"size {text!r} is more than {show_bytes(MAX_MEMORY_BYTES)}, the most that is counted;"
            " write a smaller one"
        )
    return size_bytes


def parse_devices(
    spec: str, accelerators: Collection[str] = (), asked: str = ""
) -> tuple[PoolSpec, ...]:
    """Parse a device spec into its pools, in order; a part without a count is one device.

    Case does not matter. `accelerators` are the names allowed in place of a size. Errors show
    `asked`, if `spec` is only a part of what was asked for.

    Raises:
        SpecError: if a part is malformed, its count is below 1, or there are more than
            `MAX_DEVICES` devices.

    """
    try:
        pools = tuple(_parse_pool(part.strip(), accelerators) for part in spec.lower().split("+"))
        total = sum(pool.count for pool in pools)
        if total > MAX_DEVICES:
            raise SpecError(f"{total} devices are too many, at most {MAX_DEVICES}")
    except SpecError as error:
        shown = " ".join((asked or spec).split())
        raise SpecError(f"devices={shown}: {error}; write {DEVICE_GRAMMAR}") from None
    return pools


def _parse_pool(part: str, accelerators: Collection[str]) -> PoolSpec:
    if not part:
        raise SpecError("a part is empty")
    counted = _COUNTED.fullmatch(part)
    if counted and len(counted[1]) > _MOST_DIGITS:
        raise SpecError(f"count {counted[1][:_MOST_DIGITS]}... has more than {_MOST_DIGITS} digits")
    count, size_or_name = (int(counted[1]), counted[2]) if counted else (1, part)
    if count < 1:
        raise SpecError(f"count {count} in {part!r} must be at least 1")
    if not size_or_name:
        raise SpecError(f"{part!r} has a count but no size or accelerator")
    # Only sizes begin with a number: no accelerator is called 3090.
    if size_or_name in accelerators:
        return PoolSpec(count, None, size_or_name)
    if _NUMBER_FIRST.match(size_or_name):
        return PoolSpec(count, parse_size_bytes(size_or_name), None)
    known = nearest_names(size_or_name, accelerators) if accelerators else "none are known here"
    raise SpecError(f"there is no accelerator {size_or_name!r}, {known}")


def _unit_names() -> str:
    return "units are " + ", ".join(_UNITS)
