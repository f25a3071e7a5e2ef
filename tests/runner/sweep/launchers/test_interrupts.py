"""How a worker stops: once, and with a report."""

import signal
import subprocess
import sys

from fxpart.support.signals import held_back
from runner.sweep.launchers.worker import interruptible, when_it_ends

TWICE = """
import os, signal
from runner.sweep.launchers.worker import interruptible
try:
    with interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit("not heard")
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print("once")
"""


LATER = """
import os, signal
from runner.sweep.launchers.worker import interruptible
os.kill(os.getpid(), signal.SIGINT)
print("not yet")
try:
    with interruptible():
        raise SystemExit("not heard")
except KeyboardInterrupt:
    print("now")
"""


def test_an_interrupt_is_raised_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


def test_without_an_interrupt_nothing_changes() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_processes_started_with_interrupts_blocked_receive_none_until_they_ask() -> None:
    with held_back(signal.SIGINT):
        done = subprocess.run(
            [sys.executable, "-c", LATER], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "not yet\nnow\n", "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    when_it_ends(process.pid)  # it is our child, and a zombie until we wait for it
    assert process.wait() == 0
    when_it_ends(process.pid)


REMOVES = """
import os
from joblib.externals.loky.backend import resource_tracker
from runner.sweep.launchers.joblib_workers import _pool
from runner.sweep.launchers.tickets import Work
_pool(1, Work("digest", b"", ".", "host", os.getpid()))
resource_tracker.register("/removed", "semlock")
os._exit(0)
"""


def test_a_semaphore_removed_during_an_interrupt_is_no_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REMOVES], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
