"""Run one job of a sweep, in any process, under its lock and unless it has a result."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxpart.errors import CacheError, FxpartError, SpecError
from fxpart.support.whole_file import remove_abandoned
from runner.config.paths import shown_path
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.job.attempts import set_aside_held
from runner.job.identity import JobIdentity, SweepIds
from runner.job.job import RESULT_FILE, TRACEBACK_FILE, keep_failure, run_job
from runner.job.locks import Locks
from runner.output.result_files import SETTLED, read_result
from runner.sweep.swept_job import Job, JobEnd
from runner.tracking.tracker import LoggedRun, Tracker

__all__ = [
    "PlacedJob",
    "end_in_folder",
    "ends_in_files",
    "ends_in_store",
    "run_placed",
]


@dataclass(frozen=True, eq=False, slots=True)
class PlacedJob:
    """A job with its folder, its sweep and its tracking."""

    job: Job
    folder: Path
    root: Path
    """The working directory of the sweep."""
    sweep: SweepIds
    tracking: TrackingConfig
    """Where to log the job."""
    resume: bool
    """Whether a result of another sweep counts as the job's own."""


def run_placed(placed: PlacedJob, tracker: Tracker) -> JobEnd:
    """Wait until no other process runs the job, and run it unless it then has a result."""
    locks, key = Locks(placed.root), placed.job.key
    with locks.held(key):
        try:
            known = _known_by_now(placed, tracker, locks)
        except TrackingError:
            known = None  # without the store, the result stays on disk
        return known or _run(placed)


def _known_by_now(placed: PlacedJob, tracker: Tracker, locks: Locks) -> JobEnd | None:
    """Return the end of a job whose lock is held, or None.

    Since the sweep began, another process may have finished the job, or been killed running it.
    """
    key, sweep = placed.job.key, placed.sweep.sweep
    if not tracker.runs({"kind": "run", "config_key": key}):  # a single query for most jobs
        return None
    set_aside_held(tracker, key, locks, placed.root, sweep)
    return ends_in_store(tracker, [key], sweep, resume=placed.resume).get(key)


def _run(placed: PlacedJob) -> JobEnd:
    job = placed.job
    identity = JobIdentity(
        choices=job.choices,
        overrides=job.overrides,
        folder=placed.folder,
        root=placed.root,
        sweep=placed.sweep,
        key=job.key,
        inputs=job.inputs,
        tracking=placed.tracking,
    )
    try:
        remove_earlier_end(placed.folder)
        remove_abandoned(placed.folder, below=True)
        if job.config is None:
            raise SpecError(job.error or "no configuration")
    except FxpartError as error:
        outcome = keep_failure(job.config, identity, error)
    else:
        assert job.config is not None, "one without a configuration has an error"
        outcome = run_job(job.config, identity)
    return JobEnd(outcome.status, outcome.metrics, outcome.error, run_id=outcome.run_id)


def remove_earlier_end(folder: Path) -> None:
    """Remove the result of an earlier attempt at a job, which must not count for the next one.

    Raises:
        CacheError: if the folder cannot be written.

    """
    try:
        for name in (RESULT_FILE, TRACEBACK_FILE):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(
            f"cannot remove {shown_path(Path(error.filename))}: {error.strerror}; make the folder"
            " writable, or choose another with hydra.sweep.dir="
        ) from error


# Earlier results: in the store, or in the files of a sweep without a store.


def ends_in_store(
    tracker: Tracker, keys: Collection[str], sweep: str, *, resume: bool
) -> Mapping[str, JobEnd]:
    """Return the results of jobs, by key; unless `resume`, only those of this sweep.

    Runs of other sweeps join this one, so that its tables show them. Raises `TrackingError`.
    """
    settled = tracker.settled("config_key", keys, lambda run: resume or sweep in run.sweeps)
    strangers = [run.run_id for run in settled.values() if sweep not in run.sweeps]
    tracker.join_sweep(strangers, sweep)
    return {key: _end_of_run(run) for key, run in settled.items()}


def _end_of_run(run: LoggedRun) -> JobEnd:
    return JobEnd(
        run.tags["outcome"],
        run.metrics,
        run.tags.get("error"),
        known=True,
        run_id=run.run_id,
        parent_run=run.tags.get("mlflow.parentRunId"),
    )


def ends_in_files(folder: Path, keys: Collection[str], sweep: str) -> Mapping[str, JobEnd]:
    """Return the sweep's results below `folder`, by key."""
    ends: dict[str, JobEnd] = {}
    for path in sorted(folder.rglob(RESULT_FILE)):
        try:
            result = read_result(path)
        except FxpartError:
            continue  # a damaged file is no result: the job is run again
        key = result.get("key")
        is_ours = key in keys and result.get("sweep") == sweep
        if is_ours and result["status"] in SETTLED:
            ends[str(key)] = replace(_end_of_result(result), known=True)
    return ends


def end_in_folder(folder: Path, sweep: str) -> JobEnd | None:
    """Return the end of the job that ran in `folder`; None without a result of `sweep`."""
    try:
        result = read_result(folder / RESULT_FILE)
    except FxpartError:
        return None
    return _end_of_result(result) if result.get("sweep") == sweep else None


def _end_of_result(result: Mapping[str, Any]) -> JobEnd:
    return JobEnd(result["status"], result["metrics"], result["error"])
