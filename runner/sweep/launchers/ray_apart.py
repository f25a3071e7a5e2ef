"""Jobs on a Ray cluster, from the sweep's side: a separate driver process talks to Ray.

Ray may kill the driver (see `runner.sweep.launchers.ray_driver`) without ending the sweep.
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
from runner.sweep.launchers.tickets import LostJobError, Ticket, Work, failed, python_path
from runner.sweep.launchers.worker import GRACE_S

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hydra.core.utils import JobReturn

__all__ = ["connect_apart", "end_session", "over_ray_apart"]


# Leftovers of a killed process, found by its session if there is ``/proc``.

_LOOK_S = 0.05
_GONE = ("Z", "X")
"""States of processes that have ended but whose parent has not waited for them."""


def end_session(leader: int) -> None:
    """Kill the remaining processes of the session of `leader`, and wait until they are gone.

    A job that died a little later would still hold its lock when it is started again.
    """
    end_s = time.monotonic() + GRACE_S
    while (remaining := _of_session(leader)) and time.monotonic() < end_s:
        for process in remaining:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_S)  # they are not children of this process, which cannot wait for them


def _of_session(leader: int) -> list[int]:
    """Return the processes of a session; none without ``/proc``."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process may have ended
            # The name in parentheses may contain anything; then state, parent, group, session.
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
"""The driver of this process, reused with its cluster by later launches of the sweep."""


def connect_apart(init: Mapping[str, Any]) -> None:
    """Connect to the cluster of `init`, for later launches.

    Raises:
        SpecError: if there is none, or the driver dies.

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


def _no_cluster(init: Mapping[str, Any], reason: str) -> SpecError:
    return SpecError(
        f"no Ray cluster at {address_of(init)}: {reason}; see whether `ray status` finds it"
    )


def over_ray_apart(
    work: Work,
    tickets: Sequence[Ticket],
    init: Mapping[str, Any],
    remote: Mapping[str, Any],
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job as it ends, like `over_ray`.

    If Ray ends, the remaining jobs are lost, and the next launch starts another driver.

    Raises:
        SpecError: like `over_ray`.

    """
    from hydra.core.utils import JobStatus

    remaining = {ticket.index: ticket for ticket in tickets}
    connection = _driver().connection
    reason, is_lost = "", False
    try:
        connection.send((work, tuple(tickets), dict(init), dict(remote)))
        while remaining:
            index, end = _answer(connection)
            del remaining[index]
            is_lost |= end.status is JobStatus.FAILED
            yield index, end
    except (EOFError, OSError):  # it ended without an answer
        reason = f"the process that talks to it {_let_go()}"
    except LostJobError as broken:
        reason = str(broken)
        _let_go()
    except BaseException:
        _let_go()
        raise
    if is_lost:
        # Ray as a whole may be ending: the next launch starts another driver.
        _let_go()
    for ticket in remaining.values():
        yield ticket.index, failed(ticket, LostJobError(f"Ray went away: {reason}"))


def _answer(connection: "Connection[Any, Any]") -> list[Any]:
    """Return the index and result of the next job that ends; empty once connected.

    Raises:
        SpecError: if no job can start, for a reason that the user can fix.
        LostJobError: if no other job will end.
        EOFError: if the driver is gone. An OSError means the same.

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
    """Return the driver process, the same one as long as it is alive."""
    if _kept and _kept[0].process.poll() is not None:
        _let_go()
    if not _kept:
        _kept.append(_start())
        atexit.register(_let_go)
    return _kept[0]


def _start() -> _Driver:
    our_end, driver_end = Pipe()
    with driver_end:
        # -P: do not import from the working directory, unless this process does. In a session of
        # its own the driver gets no Ctrl-C from the terminal: it is ended by closing the pipe.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(driver_end.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
            pass_fds=(driver_end.fileno(),),
            start_new_session=True,
        )
    return _Driver(process, our_end)


def _let_go() -> str:
    """End the driver, which interrupts its jobs and disconnects; return how it ended, as text."""
    atexit.unregister(_let_go)
    if not _kept:
        return "is gone"
    driver = _kept.pop()
    driver.connection.close()
    try:
        driver.process.wait(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after an interrupt: no process may remain
        driver.process.kill()
        code = driver.process.wait()
        end_session(driver.process.pid)
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"
