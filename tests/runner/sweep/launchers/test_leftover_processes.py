"""Processes that outlive the process that started them."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner.sweep.launchers.ray_apart import end_session
from tests.runner.sweep.launchers.driven import wait_until_gone

# Its child is in a group of its own, as those of Ray are, and prints its number.
LEADER = """
import subprocess, sys
sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
print(subprocess.Popen(sleeps, process_group=0, stdout=subprocess.DEVNULL).pid)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_only_processes_left_by_a_session_are_ended() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(leader.communicate()[0])
    assert Path(f"/proc/{child}").exists()
    end_session(leader.pid)
    wait_until_gone(child)
    assert other.poll() is None
    other.communicate(b"\n")
    assert other.returncode == 0
