"""How far a sweep is: done, failed, left, and the time to go. On stderr."""

import sys
from collections import Counter
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from runner.sweeps.jobs import JobEnd
from runner.terminal import counted

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["SweepProgress", "time_text"]

_EVERY_S = 15.0
"""Between two lines in a log."""
_TELLING = 3
"""Jobs that have to end before they say how long the others take."""


class SweepProgress:
    """Counts jobs; a terminal shows a bar, a log a line now and then and one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._counts: Counter[str] = Counter()
        self._ran = 0
        self._start_s = self._said_s = self._first_end_s = monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        """Start the clock, and on a terminal the bar."""
        self._start_s = self._said_s = monotonic()
        if sys.stderr.isatty():
            self._bar = _bar(self._total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away and say in one line how far it came."""
        if self._bar:
            self._bar.stop()
        took = f" in {time_text(monotonic() - self._start_s)}"
        _say(f"{self._tally()}{took if self._ran else ''}")

    def add(self, end: JobEnd) -> None:
        """Count a job that has ended."""
        self._counts[end.status] += 1
        self._counts["known"] += end.known
        self._ran += not end.known
        if self._ran == 1 and not end.known:
            self._first_end_s = monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done, tally=self._rest())
        elif self._ran and self._done < self._total and monotonic() - self._said_s > _EVERY_S:
            self._said_s = monotonic()
            _say(f"{self._tally()}, {self._rest()}")

    def tell(self, line: str) -> None:
        """Say what happened beside jobs that ended."""
        _say(line)

    @property
    def _done(self) -> int:
        return sum(n for status, n in self._counts.items() if status != "known")

    def _tally(self) -> str:
        """Return for instance ``12 of 48 jobs done (4 before; 2 do not fit, 1 failed)``."""
        before, unfit = self._counts["known"], self._counts["infeasible"]
        failed = self._counts["failed"] + self._counts["lost"]
        notes = [
            f"{before} before" if before else "",
            f"{unfit} {'does' if unfit == 1 else 'do'} not fit" if unfit else "",
            f"{failed} failed" if failed else "",
        ]
        said = ", ".join(note for note in notes if note)
        jobs = counted(self._total, "job")
        return f"{self._done} of {jobs} done{f' ({said})' if said else ''}"

    def _rest(self) -> str:
        left = self._total - self._done
        if self._ran < _TELLING:
            return f"{left} left"
        # The first end is that of what comes once: processes that start, a model that is captured.
        each_s = (monotonic() - self._first_end_s) / (self._ran - 1)
        return f"{left} left, about {time_text(left * each_s)} to go"


def _bar(total: int) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("jobs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tally]}", markup=False),
        console=Console(stderr=True, markup=False, emoji=False),
        transient=True,
        redirect_stdout=False,  # results may be piped elsewhere
    )
    bar.add_task("jobs", total=total, tally="")
    return bar


def _say(line: str) -> None:
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
