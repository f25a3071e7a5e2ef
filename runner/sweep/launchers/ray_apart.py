"""Jobs on a Ray cluster, from the side of the sweep: a process apart talks to Ray.

Ray may end that process (see `runner.sweep.launchers.ray_driver`) without ending the sweep.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from runner.sweep.launchers.ray_address import address_of
from runner.sweep.launchers.ray_driver import BROKEN, CONNECTED, ENDED, LEAVE_S, NOTED, REFUSED
from runner.sweep.launchers.work import LostJobError, Ticket, Work, failed, python_path
from runner.sweep.launchers.worker import GRACE_S

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hydra.core.utils import JobReturn

__all__ = ["connect_apart", "end_session", "over_ray_apart"]


# What is left of a process that was killed: found by its session, where there is ``/proc``.

_LOOK_S = 0.05
_GONE = ("Z", "X")
"""States of processes that have ended, and that their parent has not waited for."""


def end_session(leader: int) -> None:
    """Kill what is left of the session that the process `leader` began, and wait until it is gone.

    A job that dies a little later would still hold the lock of the same job begun anew.
    """
    end_s = time.monotonic() + GRACE_S
    while (left := _of_session(leader)) and time.monotonic() < end_s:
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_S)  # they are not children of this process, which cannot wait for them


def _of_session(leader: int) -> list[int]:
    """Return the processes of a session; none where there is no ``/proc``."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # A name in parentheses, which may hold anything, then state, parent, group, session.
            state, _, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in _GONE:
                processes.append(int(path.parent.name))
    return processes


_PROGRAM = "runner.sweep.launchers.ray_driver"


@dataclass(frozen=True, eq=False, slots=True)
class _Driver:
    """The process that talks to Ray."""

    process: "subprocess.Popen[bytes]"
    connection: "Connection[Any, Any]"


_kept: list[_Driver] = []
"""The driver of this process, with its cluster, kept for further launches of the sweep."""


def connect_apart(init: Mapping[str, Any]) -> None:
    """Connect to the cluster that `init` names, for the launches to come.

    Raises:
        SpecError: in one line, where there is none.

    """
    connection = _driver().connection
    try:
        connection.send((None, (), dict(init), {}))
        _answer(connection)
    except (EOFError, OSError):
        raise _no_cluster(init, f"the process that talks to it {_let_go()}") from None
    except LostJobError as broken:
        _let_go()
        raise _no_cluster(init, str(broken)) from None
    except BaseException:
        _let_go()
        raise


def _no_cluster(init: Mapping[str, Any], why: str) -> SpecError:
    return SpecError(
        f"no Ray cluster at {address_of(init)}: {why}; see whether `ray status` finds it"
    )


def over_ray_apart(
    work: Work,
    tickets: Sequence[Ticket],
    init: Mapping[str, Any],
    remote: Mapping[str, Any],
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield each job's number and how it ended, as they end, as `over_ray` does.

    If Ray ends, the jobs that are left are lost; the next launch starts another driver.

    Raises:
        SpecError: as `over_ray`.

    """
    from hydra.core.utils import JobStatus

    left = {ticket.index: ticket for ticket in tickets}
    connection = _driver().connection
    gone, is_lost = "", False
    try:
        connection.send((work, tuple(tickets), dict(init), dict(remote)))
        while left:
            index, end = _answer(connection)
            del left[index]
            is_lost |= end.status is JobStatus.FAILED
            yield index, end
    except (EOFError, OSError):  # it ended without an answer
        gone = f"the process that talks to it {_let_go()}"
    except LostJobError as broken:
        gone = str(broken)
        _let_go()
    except BaseException:
        _let_go()
        raise
    if is_lost:
        # Perhaps all of Ray is ending: the next launch starts another driver.
        _let_go()
    for ticket in left.values():
        yield ticket.index, failed(ticket, LostJobError(f"Ray went away: {gone}"))


def _answer(connection: "Connection[Any, Any]") -> list[Any]:
    """Return the number of the next job that ends, and how it ended; nothing once connected.

    Raises:
        SpecError: where the user can mend why no job starts.
        LostJobError: when no other job will end.
        EOFError: when the other process is gone. An OSError is the same.

    """
    while True:
        rest: list[Any]
        kind, *rest = connection.recv()
        if kind in (ENDED, CONNECTED):
            return rest
        if kind == REFUSED:
            raise SpecError(rest[0])
        if kind == BROKEN:
            raise LostJobError(rest[0])
        if kind == NOTED:
            with suppress(OSError, ValueError):  # the reader of stderr may be gone
                sys.stderr.write(f"{rest[0]}\n")


def _driver() -> _Driver:
    """Return the process that talks to Ray: the same one as long as it lives."""
    if _kept and _kept[0].process.poll() is not None:
        _let_go()
    if not _kept:
        _kept.append(_start())
        atexit.register(_let_go)
    return _kept[0]


def _start() -> _Driver:
    our_end, driver_end = Pipe()
    with driver_end:
        # -P: the working directory is no place to import from, unless it is one here. A session of
        # its own gets no Ctrl-C of the terminal: the driver is ended by closing the pipe.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(driver_end.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
            pass_fds=(driver_end.fileno(),),
            start_new_session=True,
        )
    return _Driver(process, our_end)


def _let_go() -> str:
    """End the driver, which interrupts its jobs and leaves Ray; return how it ended, in words."""
    atexit.unregister(_let_go)
    if not _kept:
        return "is gone"
    driver = _kept.pop()
    driver.connection.close()
    try:
        driver.process.wait(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # after an interrupt too: no process may stay
        driver.process.kill()
        code = driver.process.wait()
        end_session(driver.process.pid)
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"
