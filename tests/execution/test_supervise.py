"""A stage process that dies or hangs ends all, is named, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fxpart.errors import ExecutionError
from tests.execution.light_stage import ROOT, known_to_workers, napping, run_fates

# They read /proc.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a run; the test sets the behaviour of every stage process."""
    for name, value in known_to_workers(tmp_path).items():
        monkeypatch.setenv(name, value)
    place = tmp_path / "run"
    place.mkdir()
    return place


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return children


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie stays in the table until it is waited for.
    return state != "Z"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `what` became true in time, by polling: other processes are waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_stages_that_end_normally_are_no_error(folder: Path) -> None:
    run_fates(folder, ["done", "done"], silent_s=60.0)


@pytest.mark.parametrize(
    ("fates", "blamed", "message"),
    [
        # A process that lost its neighbour is not to blame, although it may report first.
        (["lost", "raise"], 1, "failed with ValueError: bucket 7 is not there, "),
        (["lost", "kill", "lost"], 1, r"was killed by SIGKILL \(out of memory\?\) while computing"),
        (["wait", "exit"], 1, "ended with exit status 0 while computing the forward of its stage"),
        (["leave", "lost"], 0, "ended with exit status 1 while computing .*: no room for bucket 7"),
        # Nor is a process that waits for it.
        (["wait", "nap"], 1, r"hangs \(computing the forward of its stage\): no stage made pro"),
        (["lost", "done"], 0, "failed with RuntimeError: Connection closed by peer"),
    ],
)
def test_trouble_is_reported_in_one_line(
    fates: Sequence[str], blamed: int, message: str, folder: Path
) -> None:
    before = _children(os.getpid())
    with pytest.raises(
        ExecutionError, match=f"^stage {blamed} of {len(fates)} {message}"
    ) as raised:
        # If nothing is waited for in vain, a busy machine gets its time.
        run_fates(folder, fates, silent_s=2.0 if "nap" in fates else 60.0)
    assert "\n" not in str(raised.value)
    assert "s after the start; all stages were ended" in str(raised.value)
    assert _wait_until(lambda: not any(_runs(pid) for pid in napping(folder)), 10.0)
    assert _children(os.getpid()) == before


def test_an_interrupt_ends_all_processes(folder: Path) -> None:
    before = _children(os.getpid())
    # Background processes of a shell ignore the signal; this process must not.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        if _wait_until(lambda: bool(napping(folder)), 60.0):
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_fates(folder, ["nap", "wait"], silent_s=80.0)
        presser.join()
        assert napping(folder)
        assert _wait_until(lambda: not any(_runs(pid) for pid in napping(folder)), 10.0)
    finally:
        signal.signal(signal.SIGINT, heard)
    assert _children(os.getpid()) == before


def test_stage_processes_end_with_their_parent(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.execution.light_stage import run_fates;"
        "run_fates(Path(sys.argv[1]), ['nap', 'nap'], 300.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT)
    try:
        assert _wait_until(lambda: len(napping(folder)) == 2, 60.0)
        (server,) = _children(parent.pid)
        workers = _children(server)
        assert sorted(workers) == sorted(napping(folder))
        assert all(_runs(worker) for worker in workers)
        parent.kill()
        assert parent.wait(60.0) == -signal.SIGKILL
        assert _wait_until(lambda: not any(_runs(pid) for pid in [server, *workers]), 60.0)
    finally:
        parent.kill()
        parent.wait()


def test_stage_processes_end_with_the_process_they_are_forked_from(folder: Path) -> None:
    killed: list[int] = []

    def kill() -> None:
        if _wait_until(lambda: len(napping(folder)) == 2, 60.0):
            killed.extend(napping(folder))
            (server,) = set(_children(os.getpid())) - before
            os.kill(server, signal.SIGKILL)

    before = set(_children(os.getpid()))
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ExecutionError, match=r"^stage 0 of 2 was killed by SIGKILL \(out of mem"):
        run_fates(folder, ["nap", "nap"], silent_s=80.0)
    killer.join()
    assert len(killed) == 2
    assert _wait_until(lambda: not any(_runs(pid) for pid in killed), 10.0)
