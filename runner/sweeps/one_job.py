"""One job of a sweep, in whichever process: claimed, run unless it is settled, and summed up."""

from dataclasses import replace
from pathlib import Path

from fxpart.errors import FxpartError, SpecError
from fxpart.temporary_name import remove_abandoned
from runner.files import read_result
from runner.files_read import job_files_read
from runner.job import RESULT_FILE, TRACEBACK_FILE, JobIdentity, keep_failure, run_job
from runner.sweeps.attempts import set_aside
from runner.sweeps.jobs import JobEnd
from runner.sweeps.locks import Locks
from runner.sweeps.settled import end_said, settled_ends
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
    return run_placed(placed, tracker, others_ended=None).status


def run_placed(placed: Placed, tracker: Tracker, others_ended: int | None) -> JobEnd:
    """Run the job in this process; one that another process is at is waited for instead.

    `others_ended` is that of the `Locks` before the sweep asked what is missing: if other processes
    have ended jobs since, this one may be among them. None is for a job that somebody may have been
    at even then, and has ended or died since.
    """
    locks = Locks(placed.root)
    with locks.held(placed.job.key) as waited:
        if not waited and locks.others_ended == others_ended:
            return _run(placed)
        try:
            known = _settled(placed, tracker) if placed.resume else None
            if known:
                return known
            placed = _without_the_dead(placed, tracker, locks)
        except TrackingError:
            pass  # nobody can tell; the result is kept on disk
        return _run(placed)


def _settled(placed: Placed, tracker: Tracker) -> JobEnd | None:
    """Return what came of the job in a run that has joined the sweep, None if it is missing."""
    key = placed.job.key
    return settled_ends(tracker, [key], placed.sweep.sweep, placed.root).get(key)


def _without_the_dead(placed: Placed, tracker: Tracker, locks: Locks) -> Placed:
    """Mark the attempts at the job whose processes died meanwhile; return it as of their sweeps."""
    key, ids = placed.job.key, placed.sweep
    of = None if placed.resume else ids.sweep
    aside = set_aside(tracker, [key], locks, sweep=of, holding=True)
    return replace(placed, sweep=replace(ids, also=(*ids.also, *aside.sweeps.get(key, ()))))


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
    for name in (RESULT_FILE, TRACEBACK_FILE):  # of an earlier attempt
        (placed.folder / name).unlink(missing_ok=True)
    remove_abandoned(placed.folder, below=True)
    if job.config is None:
        outcome = keep_failure(None, identity, SpecError(job.error or "no configuration"))
    else:
        outcome = run_job(job.config, identity)
    Locks(placed.root).count_end()
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
