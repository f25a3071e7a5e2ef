"""One job of a sweep, in whichever process: claimed, run unless it is settled, and summed up."""

from dataclasses import replace
from pathlib import Path

from fxpart.errors import FxpartError, SpecError
from fxpart.temporary_name import remove_abandoned
from runner.files import read_result
from runner.files_read import job_files_read
from runner.job import RESULT_FILE, TRACEBACK_FILE, JobIdentity, keep_failure, run_job
from runner.sweeps.attempts import set_aside_held
from runner.sweeps.jobs import JobEnd
from runner.sweeps.locks import Locks
from runner.sweeps.settled import end_said, ends_in_sweep, settled_ends
from runner.sweeps.snapshot import Placed, read_placed
from runner.tracking import Tracker, TrackingConfig, TrackingError, open_tracker

__all__ = ["end_of", "run_job_file", "run_placed"]


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
