"""`limited`: a block of a benchmark that may take only so long."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OverLimitError", "limited"]


class OverLimitError(KeyboardInterrupt):
    """A block took longer than it may.

    An interrupt, so that what turns errors of a user's model into messages lets it through.
    """


@contextmanager
def limited(limit_s: float | None, of_cpu: bool = False) -> Iterator[None]:
    """Raise `OverLimitError` in the block when it takes longer; main thread only.

    With `of_cpu` its seconds are those of CPU, of all threads of the process together.
    """
    if limit_s is None:
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise OverLimitError

    number, timer = signal.SIGALRM, signal.ITIMER_REAL
    if of_cpu:
        number, timer = signal.SIGPROF, signal.ITIMER_PROF
    before = signal.signal(number, stop)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
