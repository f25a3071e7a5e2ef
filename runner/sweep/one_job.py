"""One job of a sweep, in whichever process: claimed, run unless it is settled, and summed up."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpart.errors import FxpartError, SpecError
from fxpart.support.whole_file import remove_abandoned
from runner.config.sections import TrackingConfig
from runner.errors import TrackingError
from runner.job.attempts import set_aside_held
from runner.job.files_read import changed_file, files_of, job_files_read
from runner.job.job import RESULT_FILE, TRACEBACK_FILE, JobIdentity, keep_failure, run_job
from runner.job.locks import Locks
from runner.job.swept_job import JobEnd
from runner.output.result_files import read_result
from runner.sweep.snapshot import Placed, read_placed
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, Tracker

__all__ = [
    "end_of",
    "end_said",
    "ends_in_sweep",
    "run_job_file",
    "run_placed",
    "set_outdated_aside",
    "settled_ends",
    "settled_in_files",
]


# What is settled already, and so is not run again.

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


def run_job_file(path: Path, tracking: TrackingConfig) -> str:
    """Run the job that a launcher was given, and return its status.

    It may start long after the sweep did, or after a sweep that is gone: what was settled meanwhile
    is not run again.
    """
    placed = read_placed(path, tracking)
    tracker = open_tracker(placed.tracking, placed.root, must_answer=False)
    return run_placed(placed, tracker, others_begun=None).status


def run_placed(placed: Placed, tracker: Tracker, others_begun: int | None) -> JobEnd:
    """Run the job in this process; one that another process is at is waited for instead.

    `others_begun` is that of the `Locks` before the sweep asked what is missing: if other processes
    have begun jobs since, this one may be among them, and settled by now or cut off. So may one
    that somebody was at already, or that is asked for much later: that is None.
    """
    locks = Locks(placed.root)
    with locks.held(placed.job.key):
        if locks.others_begun != others_begun:
            try:
                placed = _as_of_the_dead(placed, tracker, locks)
                known = _settled(placed, tracker)
            except TrackingError:
                known = None  # nobody can tell; the result is kept on disk
            if known:
                return known
        return _run(placed)


def _as_of_the_dead(placed: Placed, tracker: Tracker, locks: Locks) -> Placed:
    """Mark the attempts at the job that were cut off; return it as one of their sweeps, too."""
    if not locks.work:
        return placed  # to hold one means nothing
    key, ids = placed.job.key, placed.sweep
    theirs = set_aside_held(tracker, key, locks, placed.root, ids.sweep)
    return replace(placed, sweep=replace(ids, also=(*ids.also, *theirs)))


def _settled(placed: Placed, tracker: Tracker) -> JobEnd | None:
    """Return what came of the job in a run that has joined the sweep, None if it is missing."""
    key, sweep = placed.job.key, placed.sweep.sweep
    if placed.resume:
        return settled_ends(tracker, [key], sweep, placed.root).get(key)
    return ends_in_sweep(tracker, [key], sweep).get(key)


def _run(placed: Placed) -> JobEnd:
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
    Locks(placed.root).count_begun()
    for name in (RESULT_FILE, TRACEBACK_FILE):  # of an earlier attempt
        (placed.folder / name).unlink(missing_ok=True)
    remove_abandoned(placed.folder, below=True)
    if job.config is None:
        outcome = keep_failure(None, identity, SpecError(job.error or "no configuration"))
    else:
        outcome = run_job(job.config, identity)
    files = job_files_read(job.config, placed.root)
    return JobEnd(
        outcome.status, outcome.metrics, outcome.error, run_id=outcome.run_id, files_read=files
    )


def end_of(folder: Path, sweep: str) -> JobEnd | None:
    """Return what the job that ran in `folder` left there; None if it left nothing of `sweep`."""
    try:
        result = read_result(folder / RESULT_FILE)
    except FxpartError:
        return None
    if result.get("sweep") != sweep:
        return None
    return end_said(result)
