"""Signals that processes about to be started are not to receive yet."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_back"]


@contextmanager
def held_back(*signals: signal.Signals) -> Iterator[None]:
    """Block `signals` for processes started in the block, until these unblock them, if ever.

    A terminal sends Ctrl-C to all its processes, and one that is still importing would show a
    traceback.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
