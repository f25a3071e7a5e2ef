"""Every error that fxpart raises on purpose: one root, one class for each way of being wrong.

A message is one line that says what was asked, what there is, and what to change.
"""

import difflib
from collections.abc import Callable, Iterable
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
    "show_bytes",
]


class FxpartError(Exception):
    """Root of all errors that a user can cause and mend."""


class SpecError(FxpartError, ValueError):
    """A name, number or specification that means nothing here."""


class NotApplicableError(SpecError):
    """Choices that exist and do not go together: of a grid over both, this pair asks nothing."""


class CaptureError(FxpartError, RuntimeError):
    """A model that cannot be built or captured as a graph."""


class InfeasibleError(FxpartError, RuntimeError):
    """No placement was found that respects every device's memory.

    Also a ``RuntimeError``: that is what callers of torch's partitioner catch.

    Args:
        message: one line, or a function that returns it with `devices_that_fit`. Searches pass over
            what does not fit, so what would fit is looked for only if somebody reads it.
        needed_bytes: of the whole model on one device.
        available_bytes: of all devices.
        devices_that_fit: number of devices that would hold it, where the message is a string.

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
        """The number of devices that would hold the model; None where none was looked for."""
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
    """An assignment whose partitions wait for each other in a circle."""


class ExecutionError(FxpartError, RuntimeError):
    """A run of a placed model that fails, ends too late, or computes something else."""


class CacheError(FxpartError, RuntimeError):
    """A file of ours that cannot be read or written."""


def nearest_names(unknown: str, names: Iterable[str], count: int = 3) -> str:
    """Return ``nearest: a, b`` for the names most like `unknown`, or all of them if none is.

    Those that `unknown` begins come first.
    """
    known = sorted(set(names))
    if not known:
        return "there are none"
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(unknown.lower(), list(lowered), n=count, cutoff=0.5)
    if close:
        close.sort(key=lambda name: not name.startswith(unknown.lower()))
        return "nearest: " + ", ".join(lowered[name] for name in close)
    shown = known if len(known) <= 12 else [*known[:12], f"... ({len(known)} in all)"]
    return "there are: " + ", ".join(shown)


def nearest_degrees(degree: int, counts: Iterable[int]) -> str:
    """Return the degrees next to `degree`, below and above, that divide all of `counts`."""
    common = gcd(*counts)
    fitting = [d for d in range(1, common + 1) if common % d == 0]
    below = [str(d) for d in fitting if d < degree][-1:]
    above = [str(d) for d in fitting if d > degree][:1]
    return " or ".join(below + above)


def one_line(error: BaseException, width: int = 240) -> str:
    """Return the class of `error` and the first paragraph of what it says, on one line."""
    try:
        text = str(error)
    except Exception:  # of a class whose own __str__ fails
        text = ""
    line = " ".join(text.strip().partition("\n\n")[0].split())
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    if isinstance(error, SystemExit):
        text += ", which ends the program: take the call of exit out"
    return text if len(text) <= width else text[: width - 3] + "..."


# Bytes in the units that messages use.


_MOST_SHOWN = 10**30


def show_bytes(size: int) -> str:
    """Return `size` in the largest decimal unit that leaves a digit before the point: 26.23 GB."""
    if abs(size) > _MOST_SHOWN:  # beyond what a float holds, perhaps
        return f"over {_MOST_SHOWN // 10**12} TB"
    for unit, step in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= step:
            return f"{size / step:.2f} {unit}"
    return f"{size} B"
