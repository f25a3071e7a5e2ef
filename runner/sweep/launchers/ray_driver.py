"""``python -m runner.sweep.launchers.ray_driver HANDLE``: the driver process, which talks to Ray.

When a process of a cluster dies, Ray may kill the process connected to it, at once and without a
message. So that process is never the sweep's own.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fxpart.errors import FxpartError, one_line
from runner.sweep.launchers.ray_tasks import connect, over_ray
from runner.sweep.launchers.worker import GRACE_S, interruptible

__all__ = ["BROKEN", "CONNECTED", "ENDED", "LEAVE_S", "NOTED", "REFUSED", "main"]

ENDED = "ended"
"""A job has ended: its index and result."""
CONNECTED = "connected"
"""Connected: the only answer to a request without jobs."""
NOTED = "noted"
"""A line for the user."""
REFUSED = "refused"
"""No job can start: a line that says what the user can change."""
BROKEN = "broken"
"""No other job will end: a line that says why."""
LEAVE_S = 5 * GRACE_S
"""Time to interrupt and kill running jobs, and for Ray to shut down."""

_STDERR = 2


def main() -> None:
    """Run the launches received through the pipe; when it closes, interrupt the jobs and end."""
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # a child holding it would hide our end from the sweep
    connection: Connection[Any, Any] = Connection(handle)
    launches: SimpleQueue[Any] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # while no jobs run
    with suppress(KeyboardInterrupt), interruptible():
        threading.Thread(target=_listen, args=(connection, launches), daemon=True).start()
        while _run(connection, launches.get()):
            pass
    ray = sys.modules.get("ray")
    if ray is not None:
        with suppress(Exception):  # the import may be incomplete; the rest ends with this process
            ray.shutdown()


def _listen(connection: "Connection[Any, Any]", launches: "SimpleQueue[Any]") -> None:
    """Queue the sweep's requests; when the pipe closes, interrupt this process."""
    with suppress(EOFError, OSError):
        while True:
            launches.put(connection.recv())
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)
    time.sleep(LEAVE_S)  # Ray may be in a call that ignores the interrupt
    os._exit(1)


def _run(connection: "Connection[Any, Any]", launch: tuple[Any, ...]) -> bool:
    """Run the jobs of one launch and send their results; return whether another may follow."""

    def tell(*message: object) -> None:
        with suppress(OSError):  # the sweep is gone; `_listen` interrupts us
            connection.send(message)

    try:
        work, tickets, init, remote = launch
        if not init.get("log_to_driver"):
            _hush()
        if work is None:
            connect(init)
            tell(CONNECTED)
            return True
        for index, end in over_ray(work, tickets, init, remote, lambda line: tell(NOTED, line)):
            tell(ENDED, index, end)
    except FxpartError as error:
        tell(REFUSED, str(error))
        return False
    # Ray may raise anything: the sweep reports it, and may start another driver.
    except Exception as error:
        tell(BROKEN, one_line(error))
        return False
    return True


def _hush() -> None:
    """Discard stderr: Ray writes pages to it when a process is killed."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), _STDERR)


if __name__ == "__main__":
    main()
