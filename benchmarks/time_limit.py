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
def limited(limit_s: float | None) -> Iterator[None]:
    """Raise `OverLimitError` in the block when it takes longer; main thread only."""
    if limit_s is None:
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise OverLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
