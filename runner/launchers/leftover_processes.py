"""What a process leaves behind that was killed, found by its session, where the system tells."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from runner.launchers.interrupts import GRACE_S

__all__ = ["end_session"]

_LOOK_S = 0.05
_GONE = ("Z", "X")
"""States of processes that have ended, and wait for their parent to hear of it."""


def end_session(leader: int) -> None:
    """Kill what is left of the session that the process `leader` began, and wait until it is gone.

    A job that dies a little later would still hold the lock of the same job begun anew.
    """
    end_s = time.monotonic() + GRACE_S
    while (left := _of_session(leader)) and time.monotonic() < end_s:
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_S)  # they are not children of this process: nobody tells


def _of_session(leader: int) -> list[int]:
    """Return the processes of a session; none where there is no ``/proc``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # A name in parentheses, which may hold anything, then state, parent, group, session.
            state, _, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in _GONE:
                found.append(int(path.parent.name))
    return found
