"""Find and mark attempts without a result, however their process ended.

The six rules in docs/design.md, "A kill loses only the work in flight", hold when a run or a sweep
is killed at any time and restarted, or runs next to others. This module implements the second and
third: a process that finds a RUNNING run whose lock is free first sends the unsent files on disk
(the run may have ended while the store was unreachable). If there is still no result, it marks the
run KILLED with ``kind=cut_off`` and removes it from the tables of its sweeps.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fxpart.errors import CacheError
from runner.errors import TrackingError
from runner.job.locks import LOCKS_TAG, Locks
from runner.tracking.tracker import LoggedRun, Tracker
from runner.tracking.unsent import send_unsent

__all__ = ["at_work_alone", "mark_cut_off_alone", "set_aside", "set_aside_held"]

_CUT_OFF = "cut off: its process ended before it did"
"""The error recorded for a run whose process was killed."""


def set_aside(
    tracker: Tracker, keys: Collection[str], locks: Locks, root: Path, sweep: str
) -> None:
    """Mark the attempts at jobs of `sweep` that have no result, by rules 2 and 3.

    Skips jobs that another process is running (a process that needs one waits for its lock), runs
    started in a folder whose locks are not visible from here, and single runs. Raises
    `TrackingError`.
    """
    for key in dict.fromkeys(run.tags["config_key"] for run in _attempts(tracker, keys, locks)):
        with locks.held(key, wait=False) as is_ours:
            if is_ours:
                set_aside_held(tracker, key, locks, root, sweep)


def set_aside_held(tracker: Tracker, key: str, locks: Locks, root: Path, sweep: str) -> None:
    """Mark the attempts at one job, like `set_aside`; the caller holds its lock."""
    attempts = _attempts(tracker, [key], locks)
    if any(run.status == "RUNNING" for run in attempts) and send_unsent(root / "outputs", tracker):
        attempts = _attempts(tracker, [key], locks)
    for run in attempts:
        if run.status != "FAILED":
            tracker.mark_cut_off(run.run_id, _CUT_OFF)
        elif sweep in run.sweeps:
            tracker.supersede(run.run_id)


def _attempts(tracker: Tracker, keys: Collection[str], locks: Locks) -> list[LoggedRun]:
    """Return the swept runs without a result; RUNNING ones only if their locks are visible."""
    visible = [locks.name] if locks.are_supported else []
    return [
        run
        for run in tracker.unfinished("config_key", keys)
        if run.sweeps and (run.status != "RUNNING" or run.tags.get(LOCKS_TAG) in visible)
    ]


# Single runs belong to no sweep that would clean up: the next command in their folder does it.

_ALONE, _LOCK_TAG = "alone", "lock"
"""Tags of a single run: the locks of its folder, and the key of the lock it holds."""


@contextmanager
def at_work_alone(tracker: Tracker, root: Path) -> Iterator[Mapping[str, str]]:
    """Hold a lock for a run started in `root`, and yield the tags that identify the lock.

    There are no tags if `root` is not writable or the tracker stores nothing: a later command then
    cannot find the run if it is cut off.
    """
    if not any(tracker.place):
        yield {}
        return
    with suppress(TrackingError):  # the next command tries again
        mark_cut_off_alone(tracker, root)
    try:
        locks = Locks(root)
    except CacheError:
        yield {}
        return
    key = f"alone {secrets.token_hex(8)}"
    with locks.held(key):
        yield {_ALONE: locks.name, _LOCK_TAG: key}


def mark_cut_off_alone(tracker: Tracker, root: Path) -> None:
    """Mark the single runs started in `root` that were cut off.

    Does nothing on a file system without locks. Raises `TrackingError`.
    """
    try:
        locks = Locks(root)
    except CacheError:
        return
    if not locks.are_supported:
        return
    running = tracker.runs({_ALONE: locks.name}, status="RUNNING")
    keys = dict.fromkeys(run.tags.get(_LOCK_TAG, "") for run in running)
    with ExitStack() as stack:
        free = [key for key in keys if stack.enter_context(locks.held(key, wait=False))]
        if free:
            send_unsent(root / "outputs", tracker)
        # Query again: a run may have ended in the meantime, or just been sent. The query itself
        # ends runs that have a result but no end.
        for run in tracker.unfinished(_LOCK_TAG, free):
            if run.status == "RUNNING":
                tracker.mark_cut_off(run.run_id, _CUT_OFF)
