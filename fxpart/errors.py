"""The errors that fxpart raises deliberately: a root class, and a class for each kind of failure.

A message is one line that states what was requested, what is available, and what to change.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from math import gcd
from typing import Any

__all__ = [
    "CacheError",
    "CaptureError",
    "CycleError",
    "ExecutionError",
    "FxpartError",
    "InfeasibleError",
    "NotApplicableError",
    "SpecError",
    "nearest_degrees",
    "nearest_names",
    "one_line",
    "refuse_unfitting",
    "show_bytes",
    "show_unequal_bytes",
    "told_apart",
]


class FxpartError(Exception):
    """Root of all errors that a user can cause and fix."""

    def __str__(self) -> str:
        """Return the message on one line, whatever a quoted value contains."""
        return " ".join(super().__str__().splitlines())


class SpecError(FxpartError, ValueError):
    """An invalid name, number or specification."""


class NotApplicableError(SpecError):
    """Valid choices that cannot be combined, so that a grid over both skips the combination."""


def refuse_unfitting(needing: str, fitting: Mapping[str, tuple[str, bool]], otherwise: str) -> None:
    """Raise `NotApplicableError` for the first choice that does not suit another.

    Args:
        needing: the other choice, and what it needs.
        fitting: by choice as typed, the one that is needed, and whether the choice suits.
        otherwise: the choice that needs nothing.

    """
    for got, (needed, suits) in fitting.items():
        if not suits:
            raise NotApplicableError(f"{needing}, got {got}; use {needed}, or {otherwise}")


class CaptureError(FxpartError, RuntimeError):
    """A model that cannot be built or captured as a graph."""


class InfeasibleError(FxpartError, RuntimeError):
    """No placement was found that respects every device's memory.

    Also a ``RuntimeError``, which callers of torch's partitioner catch.

    Args:
        message: one line, or a function that returns it with `devices_that_fit`. Searches discard
            many of these errors, so the number of devices is only computed if it is read.
        needed_bytes: bytes of the whole model on one device.
        available_bytes: bytes of all devices.
        devices_that_fit: number of devices that would hold the model, if the message is a string.

    """

    def __init__(
        self,
        message: str | Callable[[], tuple[str, int | None]],
        *,
        needed_bytes: int = 0,
        available_bytes: int = 0,
        devices_that_fit: int | None = None,
    ) -> None:
        super().__init__(*([message] if isinstance(message, str) else []))
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self._explanation = None if isinstance(message, str) else message
        self._devices_that_fit = devices_that_fit

    def __str__(self) -> str:
        self._explain()
        return super().__str__()

    @property
    def devices_that_fit(self) -> int | None:
        """The number of devices that would hold the model; None if unknown."""
        self._explain()
        return self._devices_that_fit

    def __reduce__(self) -> tuple[Any, ...]:
        self._explain()
        return type(self), self.args, self.__dict__

    def _explain(self) -> None:
        if self._explanation is not None:
            text, self._devices_that_fit = self._explanation()
            self.args, self._explanation = (text,), None


class CycleError(FxpartError, RuntimeError):
    """An assignment whose partitions depend on each other in a cycle."""


class ExecutionError(FxpartError, RuntimeError):
    """A run of a placed model that fails, times out, or computes other results."""


class CacheError(FxpartError, RuntimeError):
    """A file of fxpart's that cannot be read or written."""


def nearest_names(unknown: object, names: Iterable[str], count: int = 3) -> str:
    """Return ``nearest: a, b`` for the names most similar to `unknown`, or all if none is similar.

    Names that start with `unknown` come first.
    """
    known, sought = sorted(set(names)), str(unknown).lower()
    if not known:
        return "there are none"
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(sought, list(lowered), n=count, cutoff=0.5)
    if close:
        close.sort(key=lambda name: not name.startswith(sought))
        return "nearest: " + ", ".join(lowered[name] for name in close)
    shown = known if len(known) <= 12 else [*known[:12], f"... ({len(known)} in all)"]
    return "there are: " + ", ".join(shown)


def nearest_degrees(degree: int, counts: Iterable[int], multiples: Collection[int] = ()) -> str:
    """Return the nearest degrees below and above `degree` that divide all of `counts`.

    Each of `multiples` they divide as well, or are a multiple of.
    """
    common = gcd(*counts)
    fitting = [d for d in range(1, common + 1) if common % d == 0]
    fitting = [d for d in fitting if all(n % d == 0 or d % n == 0 for n in multiples)]
    below = [str(d) for d in fitting if d < degree][-1:]
    above = [str(d) for d in fitting if d > degree][:1]
    return " or ".join(below + above)


def one_line(error: BaseException, width: int = 240) -> str:
    """Return the class of `error` and the first paragraph of its message, on one line."""
    try:
        text = str(error)
    except Exception:  # the class's own __str__ fails
        text = ""
    line = " ".join(text.strip().partition("\n\n")[0].split())
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    if isinstance(error, SystemExit):
        text += ", which ends the program: take the call of exit out"
    return text if len(text) <= width else text[: width - 3] + "..."


# Sizes in the units of messages.


_MOST_SHOWN = 10**30
_MOST_DECIMALS = 12
"""Decimals that show a byte in TB, and in GiB."""


def show_bytes(size: int, decimals: int = 2) -> str:
    """Return `size` in the largest decimal unit that leaves a digit before the point: 26.23 GB."""
    if abs(size) > _MOST_SHOWN:  # may exceed the range of a float
        return f"over {_MOST_SHOWN // 10**12} TB"
    for unit, step in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= step:
            return f"{size / step:.{decimals}f} {unit}"
    return f"{size} B"


def show_unequal_bytes(first: int, second: int) -> tuple[str, str]:
    """Return both sizes as `show_bytes` does, with as many decimals as tell unequal ones apart."""
    return told_apart(lambda decimals: (show_bytes(first, decimals), show_bytes(second, decimals)))


def told_apart(show: Callable[[int], tuple[str, str]]) -> tuple[str, str]:
    """Return the texts that `show` gives two numbers, with as few decimals as tell them apart.

    At least two decimals; two if the numbers are equal.
    """
    pairs = map(show, range(2, _MOST_DECIMALS + 1))
    return next((pair for pair in pairs if pair[0] != pair[1]), show(2))
