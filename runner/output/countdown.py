"""Progress of many equal tasks on stderr: a bar on a terminal, else a line now and then."""

import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Countdown", "say", "time_text"]

_EVERY_S = 15.0
"""Time between two lines in a log."""
_ENOUGH = 3
"""Completed tasks needed to estimate the remaining time."""


class Countdown:
    """Counts `total` tasks, named by the plural `noun`; silent unless `shown`.

    With `skips`, many of the last tasks may take no time, so the estimate is an upper limit.
    """

    def __init__(self, noun: str, total: int, *, shown: bool = True, skips: bool = False) -> None:
        """Start the clock."""
        self._shown, self._word = shown, "up to" if skips else "about"
        self._noun, self._total = noun, total
        self._done = self._ran = 0
        self._start_s = self._line_s = self._first_end_s = monotonic()
        self._bar: Progress | None = None

    def start(self) -> None:
        """Restart the clock, and start the bar on a terminal."""
        self._start_s = self._line_s = monotonic()
        if self._shown and sys.stderr.isatty():
            self._bar = _bar(self._noun, self._total)
            self._bar.start()

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()

    def add(self, tally: Callable[[], str], *, took_time: bool = True) -> None:
        """Count a task, which enters the time estimate if it `took_time`.

        `tally` returns the progress as text.
        """
        self._done += 1
        self._ran += took_time
        if self._ran == 1 and took_time:
            self._first_end_s = monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done, tally=self._rest())
        elif not self._shown:
            return
        elif self._ran and self._done < self._total and monotonic() - self._line_s > _EVERY_S:
            self._line_s = monotonic()
            say(f"{tally()}, {self._rest()}")

    def note(self, what: str) -> None:
        """Show the current work on the bar, if any."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], tally=what)

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar, that is, stderr is a terminal."""
        return self._bar is not None

    @property
    def done(self) -> int:
        """The number of counted tasks."""
        return self._done

    @property
    def took(self) -> str:
        """The elapsed time, such as `` in 3 min 40 s``; empty if no task took time."""
        return f" in {time_text(monotonic() - self._start_s)}" if self._ran else ""

    def _rest(self) -> str:
        remaining = self._total - self._done
        if self._ran < _ENOUGH:
            return f"{remaining} left"
        # Without the first task, which includes one-time work such as process starts and captures.
        each_s = (monotonic() - self._first_end_s) / (self._ran - 1)
        return f"{remaining} left, {self._word} {time_text(remaining * each_s)} to go"


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
        redirect_stdout=False,  # stdout may be piped elsewhere
    )
    bar.add_task(noun, total=total, tally="")
    return bar


def say(line: str) -> None:
    """Write a line to stderr."""
    with suppress(OSError, ValueError):  # the reader of stderr may be gone
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def time_text(seconds: float) -> str:
    """Return a duration as text: ``8 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
