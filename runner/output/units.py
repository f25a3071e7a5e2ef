"""Human-readable sizes and times."""

from typing import NamedTuple

from fxpart.errors import told_apart

__all__ = [
    "GIB",
    "Unit",
    "format_ids",
    "format_s",
    "format_size",
    "size_unit",
    "time_unit",
]

GIB = 2**30


class Unit(NamedTuple):
    """The unit of a column or an axis."""

    name: str
    """Its name, such as ``GiB``."""
    size: float
    """Its size in bytes, or seconds."""

    def show(self, amount: float, decimals: int = 2) -> str:
        """Return `amount` in this unit as a bare number; bytes and from 1000 with two less."""
        count = amount / self.size
        is_long = abs(count) >= 1000 or self.name == "B"
        return f"{count:.{decimals - 2 if is_long else decimals}f}"

    def show_unequal(self, first: float, second: float) -> tuple[str, str]:
        """Return both amounts as `show` does, with as many decimals as tell unequal ones apart."""
        return told_apart(
            lambda decimals: (self.show(first, decimals), self.show(second, decimals))
        )


_SIZES = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))
_TIMES = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("us", 1e-6))


def size_unit(most_bytes: float) -> Unit:
    """Return the largest unit that is not above `most_bytes`, GiB at most."""
    for unit in _SIZES:
        if most_bytes >= unit.size:
            return unit
    return Unit("B", 1)


def time_unit(most_s: float) -> Unit:
    """Return the unit for times up to `most_s` seconds; milliseconds from 0.1 ms to 10 s."""
    if most_s >= 10:
        return _TIMES[0]
    return _TIMES[1] if most_s >= 1e-4 or most_s <= 0 else _TIMES[2]


def format_size(size_bytes: float) -> str:
    """Return `size_bytes` with its unit, such as ``1.50 GiB``, or ``512 B``."""
    unit = size_unit(size_bytes)
    return f"{unit.show(size_bytes)} {unit.name}"


def format_s(time_s: float) -> str:
    """Return `time_s` with its unit, such as ``12.34 ms``."""
    unit = time_unit(time_s)
    return f"{unit.show(time_s)} {unit.name}"


def format_ids(ids: tuple[int, ...]) -> str:
    """Return sorted numbers with runs joined: ``0-3, 7``; ``-`` if there are none."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"
