"""Jobs that a launcher runs in other processes, observed from a test."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
WAIT_S = 90.0
_LOOK_S = 0.05


def settings(launcher: str, folder: Path) -> dict[str, Any]:
    """Return the settings of each launcher for two processes at a time."""
    submitit = {
        "submitit_folder": str(folder / "submitit" / "%j"),
        "array_parallelism": 2,
        "jobs_per_process": 1,
        "timeout_min": 5,
        "name": "drive",
        "stderr_to_stdout": False,
    }
    all_settings: dict[str, dict[str, Any]] = {
        "joblib": {"n_jobs": 2},
        "ray": {
            "init": {
                "num_cpus": 2,
                "include_dashboard": False,
                "log_to_driver": False,
                "logging_level": "error",
            },
            "remote": {"num_cpus": 1, "max_retries": 0},
        },
        "submitit_local": submitit,
        "submitit_slurm": {**submitit, "nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1},
    }
    return all_settings[launcher]


@contextmanager
def driving(
    launcher: str,
    task: str,
    count: int,
    folder: Path,
    *,
    changed: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process of a sweep that has begun in `folder`, as the leader of its group."""
    chosen = json.dumps(changed or settings(launcher, folder))
    program = "tests.runner.sweep.launchers.drive"
    process = subprocess.Popen(
        [sys.executable, "-m", program, launcher, chosen, task, str(count)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 - no threads here
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def hear_interrupts() -> None:
    """Undo what a shell does to tests in the background: they ignore interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ends(process: "subprocess.Popen[str]") -> list[Any]:
    """Return how the jobs ended: a status, and its return value or the reason it failed."""
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert err == ""
    statuses: list[Any] = json.loads(out)
    return statuses


def wait_for(paths: Sequence[Path]) -> None:
    """Return when all the files exist: jobs in other processes report their progress by them."""
    end_s = time.monotonic() + WAIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end_s, f"no {[str(p) for p in paths if not p.exists()]}"
        time.sleep(_LOOK_S)


def wait_until_gone(process: int) -> None:
    """Return when no process has this number: it is no child of ours to wait for."""
    end_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end_s, f"{process} is still there"
        time.sleep(_LOOK_S)
