"""Supervise stage processes: start and stop them together, and identify the one that failed."""

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fxpart.errors import ExecutionError
from fxpart.execution.pipeline_job import COMPUTING, DONE, READY, log_path

__all__ = ["run_stages"]

_START_S = 180.0
"""Seconds of silence allowed at start-up: importing torch, reading a stage, connecting."""
_POLL_S = 0.1
_GRACE_S = 0.5
"""Seconds allowed for others to end after the first, since the first is not always the cause."""
_END_S = 10.0
"""Seconds allowed for killed processes to end on a busy machine."""
_READ_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Worker:
    """A stage process and its reports."""

    stage: int
    pipe: int
    """Where it reports."""
    log: Path
    status: int | None = None
    """Exit status as in `subprocess.Popen.returncode`; None while running."""
    phase: str = "starting"
    reported_s: float = field(default_factory=time.monotonic)
    error: str = ""
    failed_s: float = 0.0
    """Time of the reported error, on a clock shared by all processes."""
    ready: bool = False
    unread: bytes = b""

    def receive(self, data: bytes) -> None:
        """Read reports: one JSON object per line, as written by `fxpart.execution.worker`."""
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
        """Whether the process ended before finishing its work."""
        return self.status is not None and (self.status != 0 or self.phase != DONE)


@dataclass(eq=False, slots=True)
class _Server:
    """The process from which stage processes are forked, and which reports how each ended."""

    process: subprocess.Popen[bytes]
    workers: list[_Worker]
    unread: bytes = b""

    @property
    def pipe(self) -> int:
        """Where it reports."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def receive(self, data: bytes) -> None:
        """Read reports: one ``[stage, status]`` per line, from `fxpart.execution.worker`."""
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            stage, status = json.loads(line)
            self.workers[stage].status = status

    def end(self) -> None:
        """Record that it ended, and with it all stage processes whose end it did not report."""
        status = self.process.wait()
        for worker in self.workers:
            if worker.status is None:
                worker.status = status


def run_stages(
    folder: Path, n_stages: int, environments: Sequence[Mapping[str, str]], silent_s: float
) -> None:
    """Run a process for each stage of the job in `folder` until all have finished.

    They are forked from one process that has imported torch and its pipelining, as the import takes
    longer than most runs.

    No process is left running when this returns or raises. If this process is killed, its stage
    processes end too (see `fxpart.execution.worker`).

    Args:
        folder: as `fxpart.execution.pipeline_job` describes it.
        n_stages: number of stages.
        environments: environment variables of each process, added to those of this one. Variables
            read while importing torch are those of stage 0.
        silent_s: seconds without a report from any stage after which the run is aborted; at least
            `_START_S` at start-up.

    Raises:
        ExecutionError: if a process ends early (raised within 2 s), or none makes progress.

    """
    begin = time.monotonic()
    with _started(folder, n_stages, environments) as server:
        try:
            _watch(server, silent_s)
        except _StageError as failure:
            elapsed_s = time.monotonic() - begin
            raise ExecutionError(
                f"stage {failure.stage} of {n_stages} {failure.what}, {elapsed_s:.1f} s after the"
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
) -> Iterator[_Server]:
    pipes = [os.pipe() for _ in range(n_stages)]
    workers = [_Worker(i, pipes[i][0], log_path(folder, i)) for i in range(n_stages)]
    server = None
    try:
        try:
            process = _start(folder, [write for _, write in pipes], environments)
        finally:
            for _, write in pipes:
                os.close(write)
        server = _Server(process, workers)
        yield server
    finally:
        if server is not None:
            _end(server)
        for worker in workers:
            os.close(worker.pipe)


def _start(
    folder: Path, pipes: Sequence[int], environments: Sequence[Mapping[str, str]]
) -> subprocess.Popen[bytes]:
    # Import this package from its folder, but nothing from the working directory.
    package_home = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "fxpart.execution.worker", str(folder), str(os.getpid())]
    stages = list(zip(pipes, map(dict, environments), strict=True))
    with log_path(folder, 0).open("ab") as log:
        return subprocess.Popen(
            [*command, json.dumps(stages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environments[0], "PYTHONPATH": paths},
            pass_fds=pipes,
            # In its own process group: Ctrl-C reaches only this process, which ends the others.
            start_new_session=True,
        )


def _end(server: _Server) -> None:
    """Kill all remaining processes and wait for them to end."""
    process = server.process
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # the latter if all have ended (macOS)
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()
    # The system closes a process's pipe when it exits.
    end_s = time.monotonic() + _END_S
    for worker in server.workers:
        while select.select([worker.pipe], [], [], max(0.0, end_s - time.monotonic()))[0]:
            if not os.read(worker.pipe, _READ_BYTES):
                break


def _watch(server: _Server, silent_s: float) -> None:
    workers = server.workers
    sources: list[_Server | _Worker] = [server, *workers]
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source.pipe, selectors.EVENT_READ, source)
        while any(worker.status is None for worker in workers):
            _listen(selector, _POLL_S)
            _refuse_death(selector, workers)
            _refuse_silence(workers, silent_s)
        _refuse_death(selector, workers)


def _refuse_death(selector: selectors.BaseSelector, workers: Sequence[_Worker]) -> None:
    if not any(worker.has_died for worker in workers):
        return
    # It may have reported completion and ended since the last read.
    _listen(selector, 0.0)
    if any(worker.has_died for worker in workers):
        end_s = time.monotonic() + _GRACE_S
        while time.monotonic() < end_s and any(worker.status is None for worker in workers):
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
            if isinstance(key.data, _Server):
                key.data.end()


def _refuse_silence(workers: Sequence[_Worker], silent_s: float) -> None:
    limit_s = silent_s if all(worker.ready for worker in workers) else max(silent_s, _START_S)
    quiet_s = time.monotonic() - max(worker.reported_s for worker in workers)
    if quiet_s <= limit_s:
        return
    # A stage that waits for another reports it, so those that compute are the ones waited for.
    computing = [worker for worker in workers if worker.phase == COMPUTING]
    undone = [worker for worker in workers if worker.phase != DONE]
    worst = min(computing or undone or workers, key=lambda worker: worker.reported_s)
    raise _StageError(
        worst.stage,
        f"hangs ({worst.phase}): no stage made progress for {quiet_s:.1f} s",
        "; raise execute.timeout_s if it needs longer",
    )


def _cause_of_death(workers: Sequence[_Worker]) -> _StageError:
    """Return the stage that failed first; others fail because their neighbour ended."""
    dead = [worker for worker in workers if worker.has_died]
    killed = [w for w in dead if w.status is not None and w.status < 0]
    silent = [w for w in dead if not w.error and w not in killed]
    failed = sorted((w for w in dead if w.error), key=lambda worker: worker.failed_s)
    independent = [w for w in failed if not _is_of_a_lost_peer(w.error)]
    worst = (killed or independent or silent or failed)[0]
    return _StageError(worst.stage, _how_it_ended(worst))


def _is_of_a_lost_peer(error: str) -> bool:
    lowered = error.lower()
    return any(text in lowered for text in ("connection closed", "connection reset", "nccl"))


def _how_it_ended(worker: _Worker) -> str:
    status = worker.status
    if worker.error:
        return f"failed with {worker.error}"
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        doubt = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{doubt} while {worker.phase}"
    lines = worker.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    last_words = f": {last[:200]}" if last else ""
    return f"ended with exit status {status} while {worker.phase}{last_words}"
