"""How far a long row of like things is: a bar on a terminal, a line now and then in a log.

On stderr, as results may be piped elsewhere.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Countdown", "say", "time_text"]

_EVERY_S = 15.0
"""Between two lines in a log."""
_TELLING = 3
"""Things that have to be done before they say how long the others take."""


class Countdown:
    """Counts `total` things, called by the plural `noun`."""

    def __init__(self, noun: str, total: int) -> None:
        """Start the clock."""
        self._noun, self._total = noun, total
        self._done = self._ran = 0
        self._start_s = self._said_s = self._first_end_s = monotonic()
        self._bar: Progress | None = None

    def start(self) -> None:
        """Start the clock anew, and on a terminal the bar."""
        self._start_s = self._said_s = monotonic()
        if sys.stderr.isatty():
            self._bar = _bar(self._noun, self._total)
            self._bar.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._bar.stop()

    def add(self, tally: Callable[[], str], *, took_time: bool = True) -> None:
        """Count one, which says nothing of the time to go unless it `took_time`.

        `tally` returns in words how far it is.
        """
        self._done += 1
        self._ran += took_time
        if self._ran == 1 and took_time:
            self._first_end_s = monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done, tally=self._rest())
        elif self._ran and self._done < self._total and monotonic() - self._said_s > _EVERY_S:
            self._said_s = monotonic()
            say(f"{tally()}, {self._rest()}")

    @property
    def done(self) -> int:
        """How many were counted."""
        return self._done

    @property
    def took(self) -> str:
        """For instance `` in 3 min 40 s``; nothing where nothing took time."""
        return f" in {time_text(monotonic() - self._start_s)}" if self._ran else ""

    def _rest(self) -> str:
        left = self._total - self._done
        if self._ran < _TELLING:
            return f"{left} left"
        # The first end is that of what comes once: processes that start, a model that is captured.
        each_s = (monotonic() - self._first_end_s) / (self._ran - 1)
        return f"{left} left, about {time_text(left * each_s)} to go"


def _bar(noun: str, total: int) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn(noun),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tally]}", markup=False),
        console=Console(stderr=True, markup=False, emoji=False),
        transient=True,
        redirect_stdout=False,  # results may be piped elsewhere
    )
    bar.add_task(noun, total=total, tally="")
    return bar


def say(line: str) -> None:
    """Write a line to stderr."""
    with suppress(OSError, ValueError):  # whoever read stderr may be gone
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def time_text(seconds: float) -> str:
    """Return a time as a person says it: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
