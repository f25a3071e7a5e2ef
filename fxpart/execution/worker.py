"""The process of one stage: ``python -m fxpart.execution.worker <folder> <stage> <parent's pid>``.

Started by `fxpart.execution.supervise`. It ends with its parent, however that ends: the kernel
kills it (Linux), and a thread watches its standard input, which closes when the parent ends.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from fxpart.errors import one_line
from fxpart.support.garbage import collect_rarely

__all__ = ["main"]

_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""
_ORPHANED = 3


class Reporter:
    """Reports to the parent through a pipe: one JSON object a line."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        # Reports may come from more than one thread: autograd has its own.
        self._lock = threading.Lock()

    def __call__(self, phase: str, error: str = "") -> None:
        """Report the phase that begins, and the error that ends the process if there is one."""
        report = {"at_s": time.monotonic(), "phase": phase, "error": error}
        with self._lock:
            os.write(self._pipe, json.dumps(report).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Run the stage that the arguments name; return the exit status."""
    collect_rarely()
    folder, stage, parent = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    _end_with(parent)
    # Output of libraries must not mix with the reports.
    report = Reporter(os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        report("importing torch")
        from fxpart.execution.stage_run import run_stage

        run_stage(folder, stage, report)
    except Exception as error:  # whatever a model may raise; the parent tells the user
        report("failed", error=one_line(_root(error)))
        raise
    report("done")
    return 0


def _end_with(parent: int) -> None:
    """End this process when `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # The parent may have ended before the signal was set.
    if os.getppid() != parent:
        os._exit(_ORPHANED)
    threading.Thread(target=_watch_input, daemon=True).start()


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 64):
        pass
    os._exit(_ORPHANED)


def _root(error: BaseException) -> BaseException:
    """Return the error that the engine wrapped in one whose text shows tensors, not the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
