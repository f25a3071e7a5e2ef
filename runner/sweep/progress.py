"""How far a sweep is: done, failed, left, and the time to go. On stderr."""

from collections import Counter
from types import TracebackType
from typing import Self

from runner.job.swept_job import JobEnd
from runner.output.countdown import Countdown, say
from runner.output.terminal import counted

__all__ = ["SweepProgress"]


class SweepProgress:
    """Counts jobs; a terminal shows a bar, a log a line now and then and one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._counts: Counter[str] = Counter()
        self._countdown = Countdown("jobs", total)

    def __enter__(self) -> Self:
        """Start the clock, and on a terminal the bar."""
        self._countdown.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away and say in one line how far it came, but for an interrupt.

        Of a sweep that is interrupted the last line says that, and how it goes on.
        """
        self._countdown.stop()
        if not isinstance(error, KeyboardInterrupt):
            say(f"{self.tally}{self._countdown.took}")

    def add(self, end: JobEnd) -> None:
        """Count a job that has ended."""
        self._counts[end.status] += 1
        self._counts["known"] += end.known
        self._countdown.add(lambda: self.tally, took_time=not end.known)

    def tell(self, line: str) -> None:
        """Say what happened beside jobs that ended."""
        say(line)

    @property
    def tally(self) -> str:
        """For instance ``12 of 48 jobs done (4 before; 2 do not fit, 1 failed)``."""
        before, unfit = self._counts["known"], self._counts["infeasible"]
        failed = self._counts["failed"] + self._counts["lost"]
        notes = [
            f"{before} before" if before else "",
            f"{unfit} {'does' if unfit == 1 else 'do'} not fit" if unfit else "",
            f"{failed} failed" if failed else "",
        ]
        said = ", ".join(note for note in notes if note)
        jobs = counted(self._total, "job")
        return f"{self._countdown.done} of {jobs} done{f' ({said})' if said else ''}"
