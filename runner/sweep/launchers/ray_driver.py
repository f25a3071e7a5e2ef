"""``python -m runner.sweep.launchers.ray_driver HANDLE``: the process of a sweep that talks to Ray.

When a process of a cluster dies, Ray may end the process that is connected to it, at once and
without a message. So that is never the sweep's own.
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
"""A job: its number and how it ended."""
CONNECTED = "connected"
"""Connected: the only answer to a first call without jobs."""
NOTED = "noted"
"""A line for the user."""
REFUSED = "refused"
"""No job can start: a line that says what the user can change."""
BROKEN = "broken"
"""No other job will end: a line that says why."""
LEAVE_S = 5 * GRACE_S
"""For an interrupt and a kill of the jobs under way, and for Ray to shut down."""

_STDERR = 2


def main() -> None:
    """Run what launches come through the pipe; when it is closed, interrupt the jobs and end."""
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # by it the sweep sees that this process is gone
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
        with suppress(Exception):  # an import that was cut off; what is left ends with us
            ray.shutdown()


def _listen(connection: "Connection[Any, Any]", launches: "SimpleQueue[Any]") -> None:
    """Queue what the sweep sends; when the pipe is closed, interrupt this process."""
    with suppress(EOFError, OSError):
        while True:
            launches.put(connection.recv())
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)
    time.sleep(LEAVE_S)  # for the answer to that; Ray may be in a call that never hears it
    os._exit(1)


def _run(connection: "Connection[Any, Any]", launch: tuple[Any, ...]) -> bool:
    """Run the jobs of one launch and send how each ends; return whether there may be another."""

    def tell(*message: object) -> None:
        with suppress(OSError):  # the sweep is gone, and the interrupt for that on its way
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
    # Whatever Ray raises: the sweep reports it, and may start another driver.
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
