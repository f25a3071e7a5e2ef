"""How a worker ends: with the sweep that it works for, or by one interrupt."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fxpart.support.whole_file import is_alive

__all__ = [
    "GRACE_S",
    "environment",
    "held_back",
    "interruptible",
    "thread_counts",
    "when_it_ends",
    "work_until_it_ends",
]


GRACE_S = 3.0
"""Time for an interrupted job to log that, before its process is killed."""
_LOOK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_watched: list[int] = []
"""The process with which this one ends, at most one."""


def work_until_it_ends(leader: int, host: str) -> None:
    """End this process with the sweep, if that runs on this machine and is killed.

    Else the jobs of a killed sweep would run on beside those of the next one.
    """
    if not _watched and host == socket.gethostname():
        _watched.append(leader)
        threading.Thread(target=_end_with, args=(leader,), daemon=True).start()


def _end_with(leader: int) -> None:
    when_it_ends(leader)
    os.kill(os.getpid(), signal.SIGINT)  # the job says that it was cut off
    time.sleep(GRACE_S)  # for that; a job in a long call outside Python does not see the signal
    os._exit(1)


def when_it_ends(process: int) -> None:
    """Return when the process, any one on this machine, has ended."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not on this system
        while is_alive(process):
            time.sleep(_LOOK_S)  # without a handle it has to be polled
        return
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)


@contextmanager
def held_back() -> Iterator[None]:
    """Start processes in the block that get no Ctrl-C until they are `interruptible`.

    A terminal sends it to all of them; one that is still importing would show a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle one interrupt or SIGTERM in the block, and ignore the next, which would cut it short.

    Both raise `KeyboardInterrupt`. Only a process's main thread gets signals; elsewhere this
    changes nothing.
    """
    is_interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not is_interrupted:  # else the process is about to end
            for number, handler in before.items():
                signal.signal(number, handler)


# How many threads the numerical libraries of a worker may start.

_NAMES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def thread_counts(cores: int, processes: int) -> dict[str, str]:
    """Return the environment in which all processes together have a thread for each core.

    Every library would otherwise start as many threads in each process as there are cores. What the
    user has set stays.
    """
    each = str(max(1, cores // processes))
    return {name: os.environ.get(name, each) for name in _NAMES}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have processes that are started in the block inherit `variables`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
