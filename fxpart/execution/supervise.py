"""Supervise stage processes: start and end them together, and name the one that failed."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fxpart.errors import ExecutionError
from fxpart.execution.pipeline_job import COMPUTING, DONE, READY, log_path

__all__ = ["run_stages"]

_START_S = 180.0
"""How long processes may be silent at start-up: importing torch, reading a stage, connecting."""
_POLL_S = 0.1
_GRACE_S = 0.5
"""How long others may take to end after the first: the first to end is not always the cause."""
_READ_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Worker:
    """One stage process, and what it has reported."""

    stage: int
    process: subprocess.Popen[bytes]
    log: Path
    phase: str = "starting"
    reported_s: float = field(default_factory=time.monotonic)
    error: str = ""
    failed_s: float = 0.0
    """When it reported the error, on the clock that all processes share."""
    ready: bool = False
    unread: bytes = b""

    def receive(self, data: bytes) -> None:
        """Read reports: JSON objects, one a line, as `fxpart.execution.worker` writes them."""
        self.reported_s = time.monotonic()
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.phase = report["phase"]
            self.ready = self.ready or self.phase == READY
            if report["error"]:
                self.error, self.failed_s = report["error"], report["at_s"]

    @property
    def has_died(self) -> bool:
        """Whether it ended before its work was done."""
        ended = self.process.poll()
        return ended is not None and (ended != 0 or self.phase != DONE)


def run_stages(
    folder: Path, n_stages: int, environments: Sequence[Mapping[str, str]], silent_s: float
) -> None:
    """Run a process for each stage of the job in `folder`, until all are done.

    No process is left when this returns or raises. If this process is killed, its stage processes
    end too (see `fxpart.execution.worker`).

    Args:
        folder: as `fxpart.execution.pipeline_job` describes it.
        n_stages: number of stages.
        environments: environment variables of each process, in addition to those of this one.
        silent_s: seconds without a report from any of them after which the run ends; at start-up,
            at least `_START_S`.

    Raises:
        ExecutionError: within 2 s after a process ends early, or when none makes progress.

    """
    begin = time.monotonic()
    with _started(folder, n_stages, environments) as workers:
        try:
            _watch(workers, silent_s)
        except _StageError as failure:
            after = time.monotonic() - begin
            raise ExecutionError(
                f"stage {failure.stage} of {n_stages} {failure.what}, {after:.1f} s after the"
                f" start; all stages were ended{failure.remedy}"
            ) from None


class _StageError(Exception):
    """The stage that caused a failure, and how it failed."""

    def __init__(self, stage: int, what: str, remedy: str = "") -> None:
        super().__init__(stage, what, remedy)
        self.stage, self.what, self.remedy = stage, what, remedy


@contextmanager
def _started(
    folder: Path, n_stages: int, environments: Sequence[Mapping[str, str]]
) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for stage in range(n_stages):
            process = _start(folder, stage, environments[stage])
            workers.append(_Worker(stage, process, log_path(folder, stage)))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    pipe.close()


def _start(folder: Path, stage: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # The folder of this package, but not the working directory.
    package_home = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "fxpart.execution.worker"]
    with log_path(folder, stage).open("wb") as log:
        return subprocess.Popen(
            [*command, str(folder), str(stage), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment, "PYTHONPATH": paths},
            # Ctrl-C goes to this process only, which then ends them.
            start_new_session=True,
        )


def _watch(workers: Sequence[_Worker], silent_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while any(worker.process.poll() is None for worker in workers):
            _listen(selector, _POLL_S)
            _refuse_death(selector, workers)
            _refuse_silence(workers, silent_s)
        _refuse_death(selector, workers)


def _refuse_death(selector: selectors.BaseSelector, workers: Sequence[_Worker]) -> None:
    if not any(worker.has_died for worker in workers):
        return
    # It may have reported that it was done, and ended, since the last read.
    _listen(selector, 0.0)
    if any(worker.has_died for worker in workers):
        end_s = time.monotonic() + _GRACE_S
        # A process closes its pipe a moment before it has ended.
        while time.monotonic() < end_s and any(w.process.poll() is None for w in workers):
            _listen(selector, _POLL_S / 10)
        _listen(selector, 0.0)
        raise _cause_of_death(workers)


def _listen(selector: selectors.BaseSelector, wait_s: float) -> None:
    for key, _ in selector.select(wait_s):
        data = os.read(key.fd, _READ_BYTES)
        if data:
            key.data.receive(data)
        else:
            selector.unregister(key.fileobj)


def _refuse_silence(workers: Sequence[_Worker], silent_s: float) -> None:
    limit_s = silent_s if all(worker.ready for worker in workers) else max(silent_s, _START_S)
    quiet_s = time.monotonic() - max(worker.reported_s for worker in workers)
    if quiet_s <= limit_s:
        return
    # A stage that waits for another reports so; the others wait for those that compute.
    computing = [worker for worker in workers if worker.phase == COMPUTING]
    undone = [worker for worker in workers if worker.phase != DONE]
    worst = min(computing or undone or workers, key=lambda worker: worker.reported_s)
    raise _StageError(
        worst.stage,
        f"hangs ({worst.phase}): no stage made progress for {quiet_s:.1f} s",
        "; raise execute.timeout_s if it needs longer",
    )


def _cause_of_death(workers: Sequence[_Worker]) -> _StageError:
    """Return the stage that failed first; others fail because their neighbour has ended."""
    dead = [worker for worker in workers if worker.has_died]
    killed = [w for w in dead if w.process.returncode and w.process.returncode < 0]
    silent = [w for w in dead if not w.error and w not in killed]
    failed = sorted((w for w in dead if w.error), key=lambda worker: worker.failed_s)
    by_itself = [w for w in failed if not _is_of_a_lost_peer(w.error)]
    worst = (killed or by_itself or silent or failed)[0]
    return _StageError(worst.stage, _how_it_ended(worst))


def _is_of_a_lost_peer(error: str) -> bool:
    lowered = error.lower()
    return any(text in lowered for text in ("connection closed", "connection reset", "nccl"))


def _how_it_ended(worker: _Worker) -> str:
    status = worker.process.returncode
    if worker.error:
        return f"failed with {worker.error}"
    if status < 0:
        name = signal.Signals(-status).name
        doubt = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{doubt} while {worker.phase}"
    lines = worker.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    last_words = f": {last[:200]}" if last else ""
    return f"ended with exit status {status} while {worker.phase}{last_words}"
