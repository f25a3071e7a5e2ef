"""Attempts that came to nothing: marked, and taken out of the tables of their sweeps."""

from collections.abc import Collection, Iterable
from pathlib import Path

from runner.job.locks import LOCKS_TAG, Locks, sweep_lock
from runner.tracking.tracker import LoggedRun, Tracker
from runner.tracking.unsent import send_unsent

__all__ = ["CUT_OFF", "set_aside", "set_aside_held"]

CUT_OFF = "cut off: its process ended before it did"
"""What is said of a run whose process was killed."""


def set_aside(
    tracker: Tracker,
    keys: Collection[str],
    locks: Locks,
    root: Path,
    sweep: str,
    *,
    others: bool,
) -> dict[str, tuple[str, ...]]:
    """Mark the attempts at these jobs that came to nothing; return whose sweeps they were, by key.

    Those whose process died are marked in every sweep; those that failed, in `sweep`, and with
    `others` in all sweeps that are over: one that is under way tells of its failures itself. Left
    alone is a run that another process is at (whoever wants its job waits for its lock), one that
    was started in a folder whose locks cannot be seen from here, and somebody's single run, which
    is part of no sweep. Raises `TrackingError`.
    """
    found = _attempts(tracker, keys, locks)
    failed_in = {one for run in found if run.status == "FAILED" for one in run.sweeps} - {sweep}
    over = {one for one in failed_in if others and not _is_under_way(tracker, one, locks)}
    at_rest = [run for run in found if run.status != "RUNNING"]
    sweeps = _mark(tracker, at_rest, sweep, over)
    for key in dict.fromkeys(run.tags["config_key"] for run in found if run.status == "RUNNING"):
        # Only under its lock is it sure that nobody ends the run, or begins it, meanwhile.
        if locks.take(key):
            try:
                held = set_aside_held(tracker, key, locks, root, sweep)
            finally:
                locks.release(key)
            sweeps[key] = (*sweeps.get(key, ()), *held)
    return sweeps


def set_aside_held(
    tracker: Tracker, key: str, locks: Locks, root: Path, sweep: str
) -> tuple[str, ...]:
    """Do the same for one job whose lock the caller holds; failures of other sweeps stay.

    Results that are kept below `root` are logged before: a run that seems to have died may have
    ended while the store was gone.
    """
    found = _attempts(tracker, [key], locks)
    if any(run.status == "RUNNING" for run in found) and send_unsent(root / "outputs", tracker):
        found = _attempts(tracker, [key], locks)
    return _mark(tracker, found, sweep, set()).get(key, ())


def _attempts(tracker: Tracker, keys: Collection[str], locks: Locks) -> list[LoggedRun]:
    """Return the runs of sweeps that came to no result, but for those of other folders' locks."""
    return [
        run
        for run in tracker.unfinished("config_key", keys)
        if run.sweeps and (run.status != "RUNNING" or run.tags.get(LOCKS_TAG) == locks.name)
    ]


def _is_under_way(tracker: Tracker, sweep: str, locks: Locks) -> bool:
    """Return whether another process is at the sweep, as far as can be seen from here."""
    parents = tracker.runs({"kind": "sweep", "sweep_id": sweep})
    return any(locks.is_held_elsewhere(sweep_lock(one.tags["sweep_key"])) for one in parents)


def _mark(
    tracker: Tracker, runs: Iterable[LoggedRun], sweep: str, over: set[str]
) -> dict[str, tuple[str, ...]]:
    """Mark runs, but for failures in other sweeps than `sweep` and those that are `over`."""
    sweeps: dict[str, tuple[str, ...]] = {}
    for run in runs:
        key = run.tags["config_key"]
        if run.status != "FAILED":
            tracker.mark_cut_off(run.run_id, CUT_OFF)
        elif sweep in run.sweeps or over.issuperset(run.sweeps):
            tracker.supersede(run.run_id)
        else:
            continue
        sweeps[key] = (*sweeps.get(key, ()), *run.sweeps)
    return sweeps
