"""Attempts without a result: found, marked and repeated, however their process ended.

What holds when a run or a sweep is killed at any time and started again, or runs beside others, are
the six rules of docs/design.md, "A kill costs what was under way". Here are the second and third:
whoever finds a run that the store calls RUNNING, and whose lock is free, takes the lock, sends what
is kept on disk (the run may have ended while the store was gone) and, if it came to no result,
marks it as KILLED, ``kind=cut_off``, in the table of no sweep.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fxpart.errors import CacheError
from runner.errors import TrackingError
from runner.job.locks import LOCKS_TAG, Locks
from runner.output.text_files import write_text
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


# Single runs have no sweep that would look for them. Each leaves a mark while it is at work, and
# the next command in its folder finds the marks whose locks are free.

_TAG = "alone"
_MARKS = Path("outputs") / ".alone"
"""A file for each run at work: it holds where the run is logged, and its name is the run's tag."""


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
    name = secrets.token_hex(8)
    try:
        locks = Locks(root)
    except CacheError:
        yield {}
        return
    # Before the mark: a mark without its lock is that of a run that is dead.
    with locks.held(_lock(name)), _marked(root / _MARKS / name, _text(tracker, locks)) as is_marked:
        yield {_TAG: name} if is_marked else {}


@contextmanager
def _marked(mark: Path, text: str) -> Iterator[bool]:
    """Have a file say `text` in here; yield whether it could be written."""
    try:
        write_text(mark, text)
    except CacheError:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            mark.unlink()


def mark_cut_off_alone(tracker: Tracker, root: Path) -> None:
    """Mark the single runs in the tracker that were started in `root` and cut off.

    None where the file system cannot tell. Raises `TrackingError`.
    """
    dead = _dead_marks(tracker, root)
    if not dead:
        return
    for run in tracker.unfinished(_TAG, [mark.name for mark in dead]):
        if run.status == "RUNNING":
            tracker.mark_cut_off(run.run_id, _CUT_OFF)
    for mark in dead:
        with suppress(OSError):
            mark.unlink()


def _dead_marks(tracker: Tracker, root: Path) -> list[Path]:
    """Return the marks of runs in the tracker whose process is gone."""
    # A name with a dot is of a file that is being written.
    marks = sorted(path for path in (root / _MARKS).glob("*") if not path.name.startswith("."))
    if not marks:
        return []
    try:
        locks = Locks(root)
    except CacheError:
        return []
    if not locks.are_supported:
        return []
    text = _text(tracker, locks)
    return [
        mark
        for mark in marks
        if _read(mark) == text and not locks.is_held_elsewhere(_lock(mark.name))
    ]


def _text(tracker: Tracker, locks: Locks) -> str:
    return "\n".join((*tracker.place, locks.name))


def _read(mark: Path) -> str | None:
    try:
        return mark.read_text(encoding="utf-8")
    except (OSError, ValueError):  # its run has ended since, or it is damaged
        return None


def _lock(name: str) -> str:
    return f"alone {name}"
