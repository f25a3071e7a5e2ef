"""A stage process that dies or hangs ends the run, and no process outlives its parent."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fxpart.errors import ExecutionError
from tests.execution.trouble import MARKS, ROOT, known_to_workers, run_into


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where a napping process leaves its mark; every process knows the operator."""
    folder = tmp_path / "marks"
    folder.mkdir()
    for name, value in {**known_to_workers(tmp_path), MARKS: str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


# They ask /proc who runs.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # One that has ended stays in the table until somebody asks how.
    return state != "Z"


def _wait_until(what: Callable[[], bool], seconds: float) -> bool:
    """Return whether `what` came true in time: other processes are waited for, asked by and by."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _left(marks: Path) -> list[Path]:
    return list(marks.parent.glob("fxpart-pipeline-*"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "failed with ValueError: bucket 7 is not there, "),
        ("kill", r"was killed by SIGKILL \(out of memory\?\) while computing the forward"),
        ("exit", "ended with exit status 0 while computing the forward of its stage"),
        ("nap", r"hangs \(computing the forward of its stage\): no stage made progress for 3"),
    ],
)
def test_trouble_of_a_stage_is_told_in_one_line(kind: str, said: str, marks: Path) -> None:
    before = _children(os.getpid())
    with pytest.raises(ExecutionError, match=f"^stage 1 of 2 {said}") as raised:
        run_into(kind, timeout_s=3.0)
    assert "\n" not in str(raised.value)
    assert "s after the start; all stages were ended" in str(raised.value)
    assert _children(os.getpid()) == before
    assert _left(marks) == []


def test_an_interrupt_ends_all_processes(marks: Path) -> None:
    before = _children(os.getpid())

    def interrupt() -> None:
        if _wait_until(lambda: any(marks.iterdir()), 60.0):
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_into("nap", timeout_s=80.0)
    presser.join()
    assert _children(os.getpid()) == before
    assert _left(marks) == []


def test_stage_processes_end_with_their_parent(marks: Path) -> None:
    code = "from tests.execution.trouble import run_into; run_into('nap', 300.0)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert _wait_until(lambda: any(marks.iterdir()), 90.0)
        workers = _children(parent.pid)
        assert len(workers) == 2
        assert all(_runs(worker) for worker in workers)
        parent.kill()
        assert parent.wait(10.0) == -signal.SIGKILL
        assert _wait_until(lambda: not any(_runs(worker) for worker in workers), 5.0)
    finally:
        parent.kill()
        parent.wait()
