"""``python -m benchmarks.kills``: sweeps that are killed at random moments and restarted.

A sweep of a tiny model is started 20 times. When a random number of its jobs are done, plus a
random part of a job, the parent, a joblib worker or the tracking server is killed by SIGKILL, and
the same command is repeated until it succeeds. Then every job must be recorded exactly once, and
the database must be intact.
"""

import argparse
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.logged_runs import logged_runs
from benchmarks.mlflow_server import Served
from benchmarks.text_table import table

_MODEL = """
from torch import nn
import torch

def build(batch_size, dtype, width=64, layers=6):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(dtype), (torch.zeros(batch_size, width, dtype=dtype),)
"""
_SWEEP = [
    "model=custom",
    "model.factory=tiny:build",
    "model.name=tiny",
    "reserve=none",
    "mode=single,size_based,kl_based,cost_aware",
    "devices=1x0.06mb,1x1mb,2x0.06mb,4x0.06mb,4x1mb",
    "transfer_rate=pcie3,pcie4,nvlink3",
]
_JOBS = 4 * 5 * 3
_JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
_JOB_S = 0.06
"""Approximate time of a job here: within it after a job's end, the next job is running."""
_LONGEST_S = 300.0
"""Seconds after which a command counts as stuck."""
_Moment = tuple[int, float]
"""Number of finished jobs, and seconds after that."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    done: int
    at_work: bool
    commands: int
    wrong: str
    cut_off: int

    def row(self, case: str) -> list[str]:
        at_work = "yes" if self.at_work else "ended before"
        done = f"{self.done} of {_JOBS}"
        return [case, at_work, done, str(self.commands), str(self.cut_off), self.wrong or "none"]


def _start(folder: Path, overrides: Sequence[str]) -> "subprocess.Popen[str]":
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "runner", "-m", *_SWEEP, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(folder.parent / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _children(pid: int) -> list[int]:
    """Return the descendant processes of `pid`."""
    children, pending = [], [pid]
    while pending:
        with suppress(OSError):
            for task in Path(f"/proc/{pending[0]}/task").iterdir():
                below = [int(child) for child in (task / "children").read_text().split()]
                children += below
                pending += below
        pending = pending[1:]
    return children


def _kill_parent(process: "subprocess.Popen[str]", _: random.Random) -> None:
    process.kill()


def _kill_worker(process: "subprocess.Popen[str]", chance: random.Random) -> None:
    workers = _children(process.pid)
    with suppress(ProcessLookupError):
        os.kill(chance.choice(workers) if workers else process.pid, signal.SIGKILL)


_Kill = Callable[["subprocess.Popen[str]", random.Random], None]
_CASES: dict[str, tuple[_Kill, list[str]]] = {
    "parent, in process": (_kill_parent, []),
    "parent, joblib": (_kill_parent, _JOBLIB),
    "worker, joblib": (_kill_worker, _JOBLIB),
}


def _rerun_until_success(folder: Path, overrides: Sequence[str]) -> int:
    """Repeat the same command until it succeeds; return how often it was run."""
    for attempt in range(1, 4):
        process = _start(folder, overrides)
        output, _ = process.communicate(timeout=_LONGEST_S)
        if process.returncode == 0:
            return attempt
    raise SystemExit(f"the same command failed three times:\n{output}")


def _store_faults(database: Path) -> tuple[str, int]:
    """Return the faults in the store, and the number of runs marked as cut off."""
    with closing(sqlite3.connect(database)) as store:
        (integrity,) = store.execute("PRAGMA integrity_check").fetchone()
    logged = logged_runs(database)
    tags = {run.info.run_id: run.data.tags for run in logged}
    running = [run.info.run_id for run in logged if run.info.status == "RUNNING"]
    runs = {run: run_tags for run, run_tags in tags.items() if run_tags.get("kind") == "run"}
    keys = Counter(run_tags.get("config_key") for run_tags in runs.values())
    parents = [run for run, run_tags in tags.items() if run_tags.get("kind") == "sweep"]
    faults = [
        f"integrity: {integrity}" if integrity != "ok" else "",
        f"{len(keys)} of {_JOBS} jobs" if len(keys) != _JOBS else "",
        *(f"{key} {n} times" for key, n in keys.items() if n != 1),
        *(f"{run} still running" for run in running),
        *(
            f"{run} is {run_tags.get('outcome')}"
            for run, run_tags in runs.items()
            if run_tags.get("outcome") not in ("finished", "infeasible")
        ),
        f"{len(parents)} sweeps" if len(parents) != 1 else "",
    ]
    cut_off = sum(run_tags.get("kind") == "cut_off" for run_tags in tags.values())
    return "; ".join(fault for fault in faults if fault), cut_off


def _wait_for(folder: Path, jobs: int, then_s: float, process: "subprocess.Popen[str]") -> None:
    """Wait until `jobs` jobs of the sweep have written their results, then `then_s`."""
    deadline = time.monotonic() + _LONGEST_S
    while _jobs_done(folder) < jobs and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)  # polling: another process writes the results
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=then_s)


def _jobs_done(folder: Path) -> int:
    return sum(1 for _ in folder.glob("outputs/sweeps/*/*/result.json"))


def _kill_during_sweep(case: str, folder: Path, moment: _Moment, chance: random.Random) -> _Outcome:
    kill, overrides = _CASES[case]
    process = _start(folder, overrides)
    _wait_for(folder, *moment, process)
    done, alive = _jobs_done(folder), process.poll() is None
    kill(process, chance)
    process.communicate(timeout=_LONGEST_S)
    commands = _rerun_until_success(folder, overrides)
    return _Outcome(done, alive, commands, *_store_faults(folder / "outputs" / "mlflow.db"))


def _kill_server_during_sweep(folder: Path, moment: _Moment) -> _Outcome:
    server = Served(folder, folder / "server.db")
    overrides = [f"tracking.uri={server.uri}"]
    try:
        server.start()
        process = _start(folder, overrides)
        _wait_for(folder, *moment, process)
        done, alive = _jobs_done(folder), process.poll() is None
        server.kill()
        process.communicate(timeout=_LONGEST_S)
        server.start()
        commands = _rerun_until_success(folder, overrides)
    finally:
        server.kill()
    return _Outcome(done, alive, commands, *_store_faults(folder / "server.db"))


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tiny.py").write_text(_MODEL)
    return folder


def _fill_cache(folder: Path) -> None:
    process = _start(folder, [])
    output, _ = process.communicate(timeout=_LONGEST_S)
    if process.returncode:
        raise SystemExit(f"a sweep failed without being killed:\n{output}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kill; exit with 1 if a job is lost or doubled or the store damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    cases = [*_CASES, "tracking server"]
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _fill_cache(_make_folder(root / "whole"))
        for number in range(options.kills):
            case = cases[number % len(cases)]
            moment = (chance.randrange(_JOBS), chance.uniform(0, _JOB_S))
            folder = _make_folder(root / f"kill{number}")
            if case == "tracking server":
                outcome = _kill_server_during_sweep(folder, moment)
            else:
                outcome = _kill_during_sweep(case, folder, moment, chance)
            failed |= bool(outcome.wrong)
            rows.append(outcome.row(case))
            print(*rows[-1], sep="  ", flush=True)
            shutil.rmtree(folder)
    print(table(["killed", "at work", "jobs done", "commands", "cut off", "wrong"], rows))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
