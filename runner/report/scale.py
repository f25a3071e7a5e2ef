"""Axes of the report's figures: from numbers and names to places."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Scale", "as_number", "in_order", "scale_of", "tick_text"]

_WIDE = 8.0
"""Positive numbers that are further apart than this get a logarithmic axis."""
_MARGIN = 0.06
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """Return where `value` is, 0 at the low end and 1 at the high end."""
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log(low), math.log(high), math.log(value)
        return (here - low) / (high - low)

    def ticks(self, about: int) -> list[float]:
        """Return round numbers on the axis, around `about` of them."""
        if not self.log:
            return _between(self.low, self.high, about)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        inside = [
            value
            for decade in decades
            for digit in (1, 2, 5)
            if self.low <= (value := digit * 10.0**decade) <= self.high
        ]
        whole = [value for value in inside if math.log10(value).is_integer()]
        return whole if len(inside) > 2 * about and len(whole) > 1 else inside


def scale_of(values: Sequence[float], below: float = _MARGIN) -> Scale:
    """Return an axis that has room for all `values`, which need not start at 0.

    `below` is the room under the least, as a part of their range.
    """
    low, high = min(values), max(values)
    if low > 0 and high / low > _WIDE:
        wide = high / low
        return Scale(low / wide**below, high * wide**_MARGIN, log=True)
    wide = (high - low) or abs(high) or 1.0
    least = low - wide * below
    return Scale(max(least, 0.0) if low >= 0 else least, high + wide * _MARGIN, log=False)


def _between(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / about
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * decade - rough)) * decade
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Return a round number as an axis shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 and value.is_integer() else f"{value:g}"


def as_number(text: str) -> float | None:
    """Return the number that `text` is, None for other words and for what has no end."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def in_order(best: Mapping[str, float | None]) -> list[str]:
    """Return the values of a parameter in their order, given the best result of each.

    Numbers go by size, and so do names with numbers in them, such as ``2x16gb`` before ``16x16gb``;
    names alone have no order of their own and go by their result, the best first.
    """
    numbers = {text: as_number(text) for text in best}
    if all(value is not None for value in numbers.values()):
        return sorted(best, key=lambda text: numbers[text] or 0.0)
    if all(_NUMBER.search(text) for text in best):
        return sorted(best, key=_natural)
    return sorted(best, key=lambda text: (_or_last(best[text]), text))


def _or_last(value: float | None) -> float:
    return math.inf if value is None else value


def _natural(text: str) -> list[tuple[int, float, str]]:
    parts = [part for part in _NUMBER.split(text) if part]
    return [(0, float(p), "") if p[0].isdigit() else (1, 0.0, p) for p in parts]
