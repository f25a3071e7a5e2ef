"""`limited`: a block of a benchmark with a time limit."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OverLimitError", "limited"]


class OverLimitError(KeyboardInterrupt):
    """A block exceeded its time limit.

    A KeyboardInterrupt, so that handlers of errors in a user's model do not catch it.
    """


@contextmanager
def limited(limit_s: float | None, of_cpu: bool = False) -> Iterator[None]:
    """Raise `OverLimitError` in the block when it exceeds the limit; main thread only.

    With `of_cpu` the limit is CPU time, summed over all threads of the process.
    """
    if limit_s is None:
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise OverLimitError

    number, timer = signal.SIGALRM, signal.ITIMER_REAL
    if of_cpu:
        number, timer = signal.SIGPROF, signal.ITIMER_PROF
    previous = signal.signal(number, stop)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, previous)
