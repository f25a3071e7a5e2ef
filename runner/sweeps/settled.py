"""What is settled already, and so is not run again."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpart.errors import FxpartError
from runner.files import read_result
from runner.files_read import changed_file, files_of
from runner.job import RESULT_FILE
from runner.sweeps.jobs import JobEnd
from runner.tracking import LoggedRun, Tracker

__all__ = ["end_said", "ends_in_sweep", "set_outdated_aside", "settled_ends", "settled_in_files"]

_SETTLED = ("finished", "infeasible")


def settled_ends(
    tracker: Tracker, keys: Collection[str], sweep: str, root: Path
) -> Mapping[str, JobEnd]:
    """Return by key what came of the jobs that are settled, whichever run did it.

    Those runs join the sweep, so that its tables show them. A result does not stand whose model
    read a file, as from `root`, that has changed since. Raises `TrackingError`.
    """
    settled = tracker.settled("config_key", keys, lambda run: _stands(run, root))
    strangers = [run.run_id for run in settled.values() if sweep not in run.sweeps]
    tracker.join_sweep(strangers, sweep)
    return {key: _end_of_run(run) for key, run in settled.items()}


def ends_in_sweep(tracker: Tracker, keys: Collection[str], sweep: str) -> Mapping[str, JobEnd]:
    """Return by key what came of the jobs that are settled by runs of the sweep.

    They are those that it ran and those that have joined it. Raises `TrackingError`.
    """
    settled = tracker.settled("config_key", keys, lambda run: sweep in run.sweeps)
    return {key: _end_of_run(run) for key, run in settled.items()}


def set_outdated_aside(
    tracker: Tracker, keys: Collection[str], sweep: str, root: Path
) -> dict[str, tuple[str, ...]]:
    """Take the sweep's results that do not stand out of its tables; new ones take their place.

    Return by key in which sweeps. Raises `TrackingError`.
    """
    sweeps: dict[str, tuple[str, ...]] = {}
    for key, run in tracker.settled("config_key", keys, lambda run: sweep in run.sweeps).items():
        if not _stands(run, root):
            tracker.supersede(run.run_id)
            sweeps[key] = run.sweeps
    return sweeps


def _stands(run: LoggedRun, root: Path) -> bool:
    return changed_file(files_of(run.tags), root) is None


def settled_in_files(
    folder: Path, keys: Collection[str], sweep: str, root: Path
) -> Mapping[str, JobEnd]:
    """Return the same of the sweep's results in `folder`, for a sweep that no store keeps."""
    found: dict[str, JobEnd] = {}
    for path in sorted(folder.rglob(RESULT_FILE)):
        try:
            said = read_result(path)
        except FxpartError:
            continue  # half a file is no result: the job is run again
        key, files = said.get("key"), said["files_read"]
        mine = key in keys and said.get("sweep") == sweep
        if mine and said["status"] in _SETTLED and changed_file(files, root) is None:
            found[str(key)] = replace(end_said(said), known=True)
    return found


def _end_of_run(run: LoggedRun) -> JobEnd:
    return JobEnd(
        run.tags["outcome"],
        run.metrics,
        run.tags.get("error"),
        known=True,
        run_id=run.run_id,
        parent_run=run.tags.get("mlflow.parentRunId"),
        files_read=files_of(run.tags),
    )


def end_said(result: Mapping[str, Any]) -> JobEnd:
    """Return the end of a job as its `result.json` says it."""
    return JobEnd(
        result["status"], result["metrics"], result["error"], files_read=result["files_read"]
    )
