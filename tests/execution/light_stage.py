"""The stage process in tests of how processes end: without torch, so that it starts at once.

`known_to_workers` makes Python use this module in place of `fxpart.execution.stage_run`. The rest
of the process, and its supervisor, are as always.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fxpart.execution.pipeline_job import COMPUTING, READY
from fxpart.execution.supervise import run_stages

ROOT = Path(__file__).resolve().parent.parent.parent
_FATES, _NAPPING = "fates.json", "napping"


def run_stage(folder: Path, index: int, say: Callable[[str], None]) -> None:
    """Do what `run_fates` wrote for this stage."""
    fate = json.loads((folder / _FATES).read_text())[index]
    say(READY)
    if fate == "wait":
        say("between two forwards: waiting")
        # Far longer than any test waits: a waiting process is killed.
        time.sleep(600)
    say(COMPUTING)
    if fate == "raise":
        raise ValueError("bucket 7 is\nnot there")
    if fate == "lost":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exit":
        os._exit(0)
    if fate == "leave":
        sys.exit("no room for bucket 7")
    if fate == "nap":
        (folder / f"{_NAPPING}.{os.getpid()}").touch()
        # Far longer than any test waits: a napping process is killed.
        time.sleep(600)


def run_fates(folder: Path, fates: Sequence[str], silent_s: float) -> None:
    """Run a process for each of `fates`: done, raise, lost, kill, exit, leave, nap or wait."""
    (folder / _FATES).write_text(json.dumps(fates))
    run_stages(folder, len(fates), [{}] * len(fates), silent_s)


def napping(folder: Path) -> list[int]:
    """Return the process ids of the napping processes."""
    return [int(path.suffix[1:]) for path in folder.glob(f"{_NAPPING}.*")]


def known_to_workers(folder: Path) -> dict[str, str]:
    """Return the environment in which a stage process runs this module."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "import tests.execution.light_stage as light\n"
        "sys.modules['fxpart.execution.stage_run'] = light\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
