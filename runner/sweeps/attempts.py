"""Attempts that came to nothing: marked, and taken out of the tables of their sweeps."""

from collections.abc import Sequence

from runner.sweeps.locks import LOCKS_TAG, Locks
from runner.tracking import LoggedRun, Tracker

__all__ = ["CUT_OFF", "set_aside"]

CUT_OFF = "cut off: its process ended before it did"
"""What is said of a run whose process was killed."""


def set_aside(tracker: Tracker, keys: Sequence[str], locks: Locks) -> dict[str, tuple[str, ...]]:
    """Mark the attempts at these jobs that came to nothing; return whose sweeps they were, by key.

    Left alone is a run that another process is at (whoever wants its job waits for its lock), one
    that was started in a folder whose locks cannot be seen from here, and somebody's single run,
    which is part of no sweep. Raises `TrackingError`.
    """
    sweeps: dict[str, tuple[str, ...]] = {}
    for run in tracker.unfinished("config_key", keys):
        mine = tuple(run.tags.get("sweeps", "").split())
        if not mine:
            continue
        key = run.tags["config_key"]
        if run.status == "FAILED":
            tracker.supersede(run.run_id)
        elif not _may_be_at_work(run, key, locks):
            tracker.mark_cut_off(run.run_id, CUT_OFF)
        else:
            continue
        sweeps[key] = (*sweeps.get(key, ()), *mine)
    return sweeps


def _may_be_at_work(run: LoggedRun, key: str, locks: Locks) -> bool:
    if run.status != "RUNNING":
        return False
    return run.tags.get(LOCKS_TAG) != locks.name or locks.is_held_elsewhere(key)
