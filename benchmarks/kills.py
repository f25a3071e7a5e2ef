"""``python -m benchmarks.kills``: sweeps that are killed at random moments, and started again.

Each of 20 times a sweep of a tiny model is begun, the parent, a worker of joblib or the tracking
server is killed by SIGKILL after a random time, and the same command is given again until it ends
well. Then every job must be there exactly once, and the database sound.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

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
_LONGEST_S = 300.0
"""After which a command is stuck."""


@contextmanager
def _server(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Serve the store of `folder` by `mlflow server` in a process group of its own."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "served")]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_up(port)
        yield process
    finally:
        _kill_group(process)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_up(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        time.sleep(0.2)  # between looks: a server says nothing when it is up
    raise SystemExit("mlflow server does not come up")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, more: Sequence[str]) -> "subprocess.Popen[str]":
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "runner", "-m", *_SWEEP, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(folder.parent / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _children(pid: int) -> list[int]:
    """Return the processes below `pid` that run Python."""
    found, todo = [], [pid]
    while todo:
        with suppress(OSError):
            for task in Path(f"/proc/{todo[0]}/task").iterdir():
                below = [int(one) for one in (task / "children").read_text().split()]
                found += below
                todo += below
        todo = todo[1:]
    return found


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


def _again(folder: Path, more: Sequence[str]) -> int:
    """Give the same command until it ends well; return how often that took."""
    for attempt in range(1, 4):
        process = _start(folder, more)
        said, _ = process.communicate(timeout=_LONGEST_S)
        if process.returncode == 0:
            return attempt
    raise SystemExit(f"the same command failed three times:\n{said}")


def _problems(database: Path) -> tuple[str, int]:
    """Return what is wrong in the store, and how many runs are marked as cut off."""
    with closing(sqlite3.connect(database)) as store:
        (sound,) = store.execute("PRAGMA integrity_check").fetchone()
        tags: dict[str, dict[str, str]] = {}
        for run, key, value in store.execute("SELECT run_uuid, key, value FROM tags"):
            tags.setdefault(run, {})[key] = value
        statuses = dict(store.execute("SELECT run_uuid, status FROM runs"))
    runs = {run: said for run, said in tags.items() if said.get("kind") == "run"}
    keys = Counter(said.get("config_key") for said in runs.values())
    parents = [run for run, said in tags.items() if said.get("kind") == "sweep"]
    wrong = [
        f"integrity: {sound}" if sound != "ok" else "",
        f"{len(keys)} of {_JOBS} jobs" if len(keys) != _JOBS else "",
        *(f"{key} {n} times" for key, n in keys.items() if n != 1),
        *(f"{run} still running" for run, status in statuses.items() if status == "RUNNING"),
        *(
            f"{run} is {said.get('outcome')}"
            for run, said in runs.items()
            if said.get("outcome") not in ("finished", "infeasible")
        ),
        f"{len(parents)} sweeps" if len(parents) != 1 else "",
    ]
    cut = sum(said.get("kind") == "cut_off" for said in tags.values())
    return "; ".join(one for one in wrong if one), cut


def _killed_once(case: str, folder: Path, after_s: float, chance: random.Random) -> tuple[Any, ...]:
    kill, more = _CASES[case]
    process = _start(folder, more)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=after_s)
    kill(process, chance)
    process.communicate(timeout=_LONGEST_S)
    times = _again(folder, more)
    return times, *_problems(folder / "outputs" / "mlflow.db")


def _server_killed(folder: Path, after_s: float) -> tuple[Any, ...]:
    port = _free_port()
    more = [f"tracking.uri=http://127.0.0.1:{port}"]
    with _server(folder, port) as server:
        process = _start(folder, more)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=after_s)
        _kill_group(server)
        process.communicate(timeout=_LONGEST_S)
    with _server(folder, port):
        times = _again(folder, more)
    return times, *_problems(folder / "server.db")


def _whole_s(folder: Path, more: Sequence[str]) -> float:
    begin = time.perf_counter()
    process = _start(folder, more)
    said, _ = process.communicate(timeout=_LONGEST_S)
    if process.returncode:
        raise SystemExit(f"a sweep that nobody killed failed:\n{said}")
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kill; exit code 1 if a job is lost, doubled, or the store damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    chance = random.Random(asked.seed)
    cases = [*_CASES, "tracking server"]
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def fresh(label: str) -> Path:
            folder = root / label
            folder.mkdir()
            (folder / "tiny.py").write_text(_MODEL)
            return folder

        # The first fills the cache of graphs.
        whole_s = {
            case: _whole_s(fresh(f"whole{i}"), _CASES[case][1]) for i, case in enumerate(_CASES)
        }
        whole_s["tracking server"] = 2 * whole_s["parent, in process"]
        for number in range(asked.kills):
            case = cases[number % len(cases)]
            after_s = chance.uniform(0.2, 1) * whole_s[case]
            folder = fresh(f"kill{number}")
            if case == "tracking server":
                times, wrong, cut = _server_killed(folder, after_s)
            else:
                times, wrong, cut = _killed_once(case, folder, after_s, chance)
            failed |= bool(wrong)
            rows.append([case, f"{after_s:.1f}", str(times), str(cut), wrong or "ok"])
            print(*rows[-1], sep="  ", flush=True)
            shutil.rmtree(folder)
    print(table(["killed", "after s", "commands", "cut off", f"all {_JOBS} jobs once"], rows))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
