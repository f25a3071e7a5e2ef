"""``python -m benchmarks.writers``: many processes log runs into one store; all values are checked.

Each run has parameters, 20 metrics, a series of 100 points, tags, a table and two files. Every
value is read back through MLflow's client and compared.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from benchmarks.postgres import new_database, postgres, postgres_programs
from benchmarks.text_table import table
from runner.config.schema import TrackingConfig
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import Tracker

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

__all__ = ["Logged", "log_at_once", "wrong_values"]

_METRICS, _POINTS, _PARAMS = 20, 100, 12
_START_S = 600.0  # for sixteen processes on two busy cores
_STORES = ("sqlite", "postgresql")
_LOOK_S = 1.0
"""Interval of checks whether a silent writer has failed."""


@dataclass(frozen=True, slots=True)
class Logged:
    """The times of the writers."""

    total_s: float
    """From all writers being ready until the last run was logged."""
    run_s: tuple[float, ...]
    """Time of each run of all writers."""


def log_at_once(uri: str | None, root: Path, writers: int, runs: int) -> Logged:
    """Log `runs` runs from each of `writers` processes at the same time; return their times.

    The processes open the store, or create it if it is missing; each logs a warm-up run first.
    Raises RuntimeError if one fails, after its traceback on stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.store.tracking.sqlalchemy_store", __name__])
    barrier = context.Barrier(writers)
    times: Queue[list[float]] = context.Queue()
    processes = [
        context.Process(target=_write, args=((uri, root), writer, runs, barrier, times))
        for writer in range(writers)
    ]
    run_times: list[list[float]] = []
    try:
        for process in processes:
            process.start()
        while len(run_times) < writers:
            try:
                run_times.append(times.get(timeout=_LOOK_S))
            except Empty:
                codes = [process.exitcode for process in processes]
                if any(codes):
                    raise RuntimeError(f"writers ended with {codes}") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    starts, ends = [run[0] for run in run_times], [run[-1] for run in run_times]
    run_s = [after - before for run in run_times for before, after in pairwise(run)]
    return Logged(max(ends) - min(starts), tuple(run_s))


def _write(
    store: tuple[str | None, Path],
    writer: int,
    runs: int,
    barrier: "Barrier",
    times: "Queue[list[float]]",
) -> None:
    """Log runs; send back the time when all were ready and the time after each run."""
    uri, root = store
    tracker = open_tracker(TrackingConfig(uri=uri), root)
    log_times = []
    for number in range(runs + 1):
        if number == 1:
            # One-time work of a process is not measured.
            gc.collect()
            barrier.wait(_START_S)
            log_times.append(time.perf_counter())
        _log(tracker, root, writer, number)
        log_times.append(time.perf_counter())
    times.put(log_times[1:])
    times.close()
    times.join_thread()


def _log(tracker: Tracker, root: Path, writer: int, number: int) -> None:
    name = f"{writer}-{number}"
    folder = root / "jobs" / name
    (folder / "config").mkdir(parents=True)
    for file in ("result.json", "config/resolved.yaml"):
        (folder / file).write_text(name * 500)
    with tracker.start(name, _params(name), {"config_key": name}, folder=folder) as run:
        run.log(
            metrics=_metrics(writer, number),
            series={"memory_gib": _series(writer)},
            tables={"devices": {"device": [0, 1], "name": [name, name]}},
            artifacts_dir=folder,
            tags={"note": name},
        )
    if run.problem:
        raise RuntimeError(run.problem)


def _params(name: str) -> dict[str, object]:
    return {f"param_{index}": f"{name}-{index}" for index in range(_PARAMS)}


def _metrics(writer: int, number: int) -> dict[str, float]:
    return {f"metric_{index}": writer + number / 7 + index for index in range(_METRICS)}


def _series(writer: int) -> list[tuple[int, float]]:
    return [(step, writer + step / 3) for step in range(_POINTS)]


def wrong_values(uri: str | None, root: Path, writers: int, runs: int) -> list[str]:
    """Return the differences between the store and what `log_at_once` wrote."""
    from mlflow import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{root / 'outputs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    stored: dict[str, Any] = {}
    wrong: list[str] = []
    token = None
    while True:
        page = client.search_runs([experiment.experiment_id], max_results=1000, page_token=token)
        for run in page:
            if run.info.run_name in stored:
                wrong.append(f"{run.info.run_name} was logged twice")
            stored[run.info.run_name] = run
        token = page.token
        if not token:
            break
    for writer in range(writers):
        for number in range(runs + 1):
            run = stored.pop(f"{writer}-{number}", None)
            wrong += _wrong_values_of_run(client, run, writer, number)
    return [*wrong, *(f"{name} is unexpected" for name in sorted(stored))]


def _wrong_values_of_run(client: Any, run: Any, writer: int, number: int) -> list[str]:  # noqa: ANN401
    name = f"{writer}-{number}"
    if run is None:
        return [f"{name} is missing"]
    last = _series(writer)[-1][1]
    history = client.get_metric_history(run.info.run_id, "memory_gib")
    files = Path(run.info.artifact_uri.removeprefix("file://"))
    checks: dict[str, tuple[object, object]] = {
        "status": (run.info.status, "FINISHED"),
        "params": (run.data.params, _params(name)),
        "metrics": (run.data.metrics, _metrics(writer, number) | {"memory_gib": last}),
        "series": ([(point.step, point.value) for point in history], _series(writer)),
        "tag": (run.data.tags.get("note"), name),
        "outcome": (run.data.tags.get("outcome"), "finished"),
        "file": ((files / "config" / "resolved.yaml").read_text(), name * 500),
        "table": (
            json.loads((files / "devices.json").read_text()),
            {"columns": ["device", "name"], "data": [[0, name], [1, name]]},
        ),
    }
    return [
        f"{name}: wrong {check}" for check, (value, expected) in checks.items() if value != expected
    ]


def main() -> int:
    """Print a line for each store; return 0 if every value is correct."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--runs", type=int, default=20, help="runs of each writer")
    parser.add_argument("--stores", nargs="+", choices=_STORES, default=_STORES)
    options = parser.parse_args()
    rows, wrong = [], []
    for store in options.stores:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            uri = None
            if store == "postgresql":
                programs = postgres_programs()
                if programs is None:
                    print("postgresql: not installed")
                    continue
                uri = new_database(stack.enter_context(postgres(programs)), "runs")
            logged = log_at_once(uri, root, options.writers, options.runs)
            store_faults = wrong_values(uri, root, options.writers, options.runs)
        wrong += [f"{store}: {line}" for line in store_faults]
        run_ms = sorted(1e3 * seconds for seconds in logged.run_s)
        figures = (statistics.median(run_ms), run_ms[-1], 1e3 * logged.total_s / len(run_ms))
        cells = [store, str(options.writers), str(len(run_ms)), f"{logged.total_s:.1f}"]
        rows.append([*cells, *(f"{figure:.0f}" for figure in figures), str(len(store_faults))])
    heads = [
        "store",
        "writers",
        "runs",
        "s in all",
        "ms a run",
        "worst",
        "ms between runs",
        "wrong",
    ]
    print(table(heads, rows))
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
