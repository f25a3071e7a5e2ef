"""The end of a worker process: with its sweep, or by an interrupt. Also its environment."""

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
    "interruptible",
    "thread_counts",
    "when_it_ends",
    "work_until_it_ends",
]


GRACE_S = 3.0
"""Time for an interrupted job to log it, before its process is killed."""
_LOOK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_watched: list[int] = []
"""The process that this one ends with, at most one."""


def work_until_it_ends(leader: int, host: str) -> None:
    """End this process when the sweep's process ends, if both are on the same machine.

    Otherwise the jobs of a killed sweep would run on next to those of the next one.
    """
    if not _watched and host == socket.gethostname():
        _watched.append(leader)
        threading.Thread(target=_end_with, args=(leader,), daemon=True).start()


def _end_with(leader: int) -> None:
    when_it_ends(leader)
    os.kill(os.getpid(), signal.SIGINT)  # the job logs that it was cut off
    time.sleep(GRACE_S)  # for logging; a long call outside Python does not notice the signal
    os._exit(1)


def when_it_ends(process: int) -> None:
    """Wait until a process on this machine, not necessarily a child, has ended."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not on this system
        while is_alive(process):
            time.sleep(_LOOK_S)  # without a handle, poll
        return
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle one SIGINT or SIGTERM in the block, and ignore further ones during its handling.

    Both raise `KeyboardInterrupt`. Only the main thread receives signals; in others this does
    nothing.
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
    previous = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not is_interrupted:  # otherwise the process is about to end
            for number, handler in previous.items():
                signal.signal(number, handler)


# Number of threads of a worker's numerical libraries.

_NAMES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def thread_counts(cores: int, processes: int) -> dict[str, str]:
    """Return environment variables that give all processes together one thread per core.

    By default every library starts a thread per core in each process. Variables set by the user are
    kept.
    """
    per_process = str(max(1, cores // processes))
    return {name: os.environ.get(name, per_process) for name in _NAMES}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment `variables` for processes started in the block."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in previous.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
