"""Locks of jobs between processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fxpart.errors import CacheError
from runner.job.locks import Locks

ASK = """
import sys, time
from pathlib import Path
from runner.job.locks import Locks
locks = Locks(Path.cwd())
"""
HOLD = f"""
{ASK}
with locks.held(sys.argv[1], wait=False) as is_ours:
    assert is_ours
    print("held", flush=True)
    time.sleep(300)  # longer than the test: it is killed
"""


@pytest.fixture
def holder(tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of ``mine``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, "mine"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_released_with_its_process(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    locks = Locks(tmp_path)
    assert locks.is_held_elsewhere("mine")
    with locks.held("mine", wait=False) as is_ours:
        assert not is_ours
    assert not locks.is_held_elsewhere("another")
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert not locks.is_held_elsewhere("mine")
    asking = [sys.executable, "-c", f"{ASK}print(locks.is_held_elsewhere('mine'))"]
    with locks.held("mine") as is_ours:
        assert is_ours
        assert not locks.is_held_elsewhere("mine")
        assert subprocess.check_output(asking, cwd=tmp_path, text=True) == "True\n"
    assert subprocess.check_output(asking, cwd=tmp_path, text=True) == "False\n"


def test_the_locks_of_each_folder_have_a_name(tmp_path: Path) -> None:
    name = Locks(tmp_path).name
    assert Locks(tmp_path).name == name != Locks(tmp_path / "elsewhere").name
    assert len(name) > 16


def test_the_name_in_a_file_of_an_earlier_version_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    name = bytes(range(1, 17))
    # It began with the number of jobs started.
    (tmp_path / "outputs" / ".jobs.lock").write_bytes((7).to_bytes(8, "big") + name)
    assert Locks(tmp_path).name == name.hex()


def test_a_lock_is_waited_for(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        holder.kill()

    threading.Timer(0.3, kill).start()
    with Locks(tmp_path).held("mine") as is_ours:
        assert is_ours
        assert killed.is_set()
    holder.communicate()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(CacheError, match="make the folder writable"):
        Locks(tmp_path)
