"""One job of a sweep, in whichever process: claimed, run unless it is settled, and summed up."""

from pathlib import Path

from fxpart.errors import FxpartError, SpecError
from runner.files import read_result
from runner.job import RESULT_FILE, JobIdentity, keep_failure, run_job
from runner.sweeps.jobs import JobEnd
from runner.sweeps.locks import Locks
from runner.sweeps.snapshot import Placed, read_placed
from runner.tracking import LoggedRun, Tracker, TrackingConfig, TrackingError, open_tracker

__all__ = ["SWEEPS", "end_of", "end_of_run", "run_job_file", "run_placed", "settled_end"]


SWEEPS = "sweeps"
"""The group of `Locks` that every process with a sweep joins."""


def run_job_file(path: Path, tracking: TrackingConfig) -> str:
    """Run the job that a launcher was given, and return its status.

    It may start long after the sweep did, or after a sweep that is gone: what was settled meanwhile
    is not run again.
    """
    placed = read_placed(path, tracking)
    with Locks(placed.root).held(placed.job.key):
        if placed.resume and _is_settled(placed):
            return "known"
        return _run(placed).status


def _is_settled(placed: Placed) -> bool:
    try:
        tracker = open_tracker(placed.tracking, placed.root, must_answer=False)
        return settled_end(tracker, placed.job.key) is not None
    except TrackingError:
        return False  # nobody can tell; the result is kept on disk


def run_placed(placed: Placed, tracker: Tracker) -> JobEnd:
    """Run the job in this process; one that another process is at is waited for instead."""
    locks = Locks(placed.root)
    with locks.held(placed.job.key) as waited:
        # What was missing when the sweep began may be done, where another one is under way.
        doubtful = placed.resume and (waited or not locks.is_alone(SWEEPS))
        known = settled_end(tracker, placed.job.key) if doubtful else None
        return known or _run(placed)


def _run(placed: Placed) -> JobEnd:
    job = placed.job
    identity = JobIdentity(
        choices=job.choices,
        overrides=job.overrides,
        folder=placed.folder,
        root=placed.root,
        sweep=placed.sweep,
        key=job.key,
        tracking=placed.tracking,
    )
    if job.config is None:
        outcome = keep_failure(None, identity, SpecError(job.error or "no configuration"))
    else:
        outcome = run_job(job.config, identity)
    return JobEnd(outcome.status, outcome.metrics, outcome.error)


def settled_end(tracker: Tracker, key: str) -> JobEnd | None:
    """Return what the store says came of the job, None if it is not settled."""
    found = tracker.settled("config_key", [key]).get(key)
    return end_of_run(found) if found else None


def end_of_run(run: LoggedRun) -> JobEnd:
    """Return what a settled run says."""
    outcome, error = run.tags["outcome"], run.tags.get("error")
    return JobEnd(outcome, run.metrics, error, known=True, run_id=run.run_id)


def end_of(folder: Path, sweep: str) -> JobEnd | None:
    """Return what the job that ran in `folder` left there; None if it left nothing of `sweep`."""
    try:
        result = read_result(folder / RESULT_FILE)
    except FxpartError:
        return None
    if result.get("sweep") != sweep:
        return None
    return JobEnd(result["status"], result["metrics"], result["error"])
