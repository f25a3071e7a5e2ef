"""Stage processes: ``python -m fxpart.execution.worker <folder> <parent's pid> <stages>``.

Started by `fxpart.execution.supervise`. This process imports the modules that stages need, forks
itself for each stage, and reports on its standard output how each ended. All end with the parent,
however that ends: the kernel kills them (Linux), and in each stage process a thread watches the
standard input, which closes when the parent ends. Stage processes also end if this one is killed.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from fxpart.errors import one_line
from fxpart.execution.pipeline_job import log_path
from fxpart.support.garbage import collect_rarely

__all__ = ["main"]

_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""
_ORPHANED = 3


class Reporter:
    """Reports to the parent through a pipe, one JSON object per line."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        # Reports may come from several threads, as autograd has its own.
        self._lock = threading.Lock()

    def __call__(self, phase: str, error: str = "") -> None:
        """Report the phase that begins, and the error that ends the process, if any."""
        report = {"at_s": time.monotonic(), "phase": phase, "error": error}
        with self._lock:
            os.write(self._pipe, json.dumps(report).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Run the stages named by the arguments, each in a process; return this one's exit status.

    `arguments` are the job's folder, the parent's process id and, as JSON, the report pipe and the
    environment variables of each stage.
    """
    collect_rarely()
    folder, parent, stages = Path(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    _end_with(parent)
    # Library output must not mix with the reports.
    statuses = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(Exception):  # each stage imports it again and reports the error
        import_module("fxpart.execution.stage_run")
    # Garbage collection in a child would touch, and so copy, all memory of the imports.
    gc.freeze()
    process_id, stage_of = os.getpid(), {}
    for stage, (pipe, environment) in enumerate(stages):
        child = os.fork()
        if child == 0:
            os.close(statuses)
            os.environ.update(environment)
            return _run(folder, stage, Reporter(pipe), process_id)
        stage_of[child] = stage
        os.close(pipe)
    while stage_of:
        child, status = os.wait()
        ended = [stage_of.pop(child), os.waitstatus_to_exitcode(status)]
        os.write(statuses, json.dumps(ended).encode() + b"\n")
    return 0


def _run(folder: Path, stage: int, report: Reporter, parent: int) -> int:
    """Run a stage in this process, forked by `parent`, and return its exit status."""
    _end_with(parent)
    threading.Thread(target=_watch_input, daemon=True).start()
    with log_path(folder, stage).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    try:
        report("importing torch")
        from fxpart.execution.stage_run import run_stage

        run_stage(folder, stage, report)
    except Exception as error:  # a model may raise anything; the parent informs the user
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


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 64):
        pass
    os._exit(_ORPHANED)


def _root(error: BaseException) -> BaseException:
    """Return the root cause of an engine's error, whose own text shows tensors, not the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
