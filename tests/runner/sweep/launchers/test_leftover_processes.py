"""Processes that outlive the one that started them."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner.sweep.launchers.ray_apart import end_session
from tests.runner.sweep.launchers.driven import wait_until_gone

# Its child is in a group of its own, as those of Ray are, and says its number.
LEADER = """
import subprocess, sys
sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
print(subprocess.Popen(sleeps, process_group=0, stdout=subprocess.DEVNULL).pid)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_what_a_session_leaves_is_ended_and_nothing_else() -> None:
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
