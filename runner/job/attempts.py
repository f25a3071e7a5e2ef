"""Attempts without a result: found, marked and repeated, however their process ended.

The six rules of docs/design.md, "A kill costs what was under way", hold when a run or a sweep is
killed at any time and started again, or runs beside others. Here are the second and third: whoever
finds a run that the store calls RUNNING, and whose lock is free, sends what is kept on disk (the
run may have ended while the store was gone) and, if it came to no result, marks it as KILLED,
``kind=cut_off``, in the table of no sweep.
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
"""The error of a run whose process was killed."""


def set_aside(
    tracker: Tracker, keys: Collection[str], locks: Locks, root: Path, sweep: str
) -> None:
    """Mark the attempts at jobs of `sweep` that have no result, by rules 2 and 3 above.

    A job that another process runs is left alone: who needs it waits for its lock. So is a run that
    was started in a folder whose locks cannot be seen from here, and a single run. Raises
    `TrackingError`.
    """
    for key in dict.fromkeys(run.tags["config_key"] for run in _attempts(tracker, keys, locks)):
        with locks.held(key, wait=False) as is_ours:
            if is_ours:
                set_aside_held(tracker, key, locks, root, sweep)


def set_aside_held(tracker: Tracker, key: str, locks: Locks, root: Path, sweep: str) -> None:
    """Do the same for one job whose lock the caller holds."""
    attempts = _attempts(tracker, [key], locks)
    if any(run.status == "RUNNING" for run in attempts) and send_unsent(root / "outputs", tracker):
        attempts = _attempts(tracker, [key], locks)
    for run in attempts:
        if run.status != "FAILED":
            tracker.mark_cut_off(run.run_id, _CUT_OFF)
        elif sweep in run.sweeps:
            tracker.supersede(run.run_id)


def _attempts(tracker: Tracker, keys: Collection[str], locks: Locks) -> list[LoggedRun]:
    """Return the runs of sweeps without a result, those RUNNING only if their locks tell."""
    visible = [locks.name] if locks.are_supported else []
    return [
        run
        for run in tracker.unfinished("config_key", keys)
        if run.sweeps and (run.status != "RUNNING" or run.tags.get(LOCKS_TAG) in visible)
    ]


# Single runs have no sweep that would look for them: the next command in their folder does.

_ALONE, _LOCK_TAG = "alone", "lock"
"""Tags of a single run: the locks of its folder, and the key of the one that it holds."""


@contextmanager
def at_work_alone(tracker: Tracker, root: Path) -> Iterator[Mapping[str, str]]:
    """Hold the lock of a run that was started in `root`; yield the tags by which it is found.

    No tags where nothing can be written below `root`, and where the tracker keeps nothing: such a
    run is never found.
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
    """Mark the single runs in the tracker that were started in `root` and cut off.

    None where the file system cannot tell. Raises `TrackingError`.
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
        # Asked again: a run may have ended since, or have been sent just now. One that has a result
        # and no end is ended by the question.
        for run in tracker.unfinished(_LOCK_TAG, free):
            if run.status == "RUNNING":
                tracker.mark_cut_off(run.run_id, _CUT_OFF)
