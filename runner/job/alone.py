"""Runs that are no job of a sweep: each is under a lock while it is at work.

So one whose process was killed outright, which MLflow would call RUNNING for ever, is found out by
the next command in its folder.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fxpart.errors import CacheError
from runner.errors import TrackingError
from runner.job.attempts import CUT_OFF
from runner.job.locks import Locks
from runner.output.text_files import write_text
from runner.tracking.tracker import Tracker

__all__ = ["at_work_alone", "mark_cut_off_alone"]

_TAG = "alone"
_MARKS = Path("outputs") / ".alone"
"""A file for each run at work: it holds where the run is logged, and its name is the run's tag."""


@contextmanager
def at_work_alone(tracker: Tracker, root: Path) -> Iterator[Mapping[str, str]]:
    """Hold the lock of a run that was started in `root`; yield the tags by which it is found.

    No tags where nothing can be written below `root`, and where the tracker keeps nothing: such a
    run is never found out.
    """
    if not any(tracker.place):
        yield {}
        return
    with suppress(TrackingError):  # the next command tries again
        mark_cut_off_alone(tracker, root)
    name = secrets.token_hex(8)
    mark = root / _MARKS / name
    try:
        locks = Locks(root)
        # Before the mark: a mark without its lock is that of a run that is dead.
        locks.take(_lock(name))
        write_text(mark, _text(tracker, locks))
    except CacheError:
        yield {}
        return
    try:
        yield {_TAG: name}
    finally:
        with suppress(OSError):
            mark.unlink()
        locks.release(_lock(name))


def mark_cut_off_alone(tracker: Tracker, root: Path) -> None:
    """Mark the runs in the tracker that were started in `root` and cut off.

    Where nobody can tell, none. Raises `TrackingError`.
    """
    dead = _dead(tracker, root)
    if not dead:
        return
    for run in tracker.unfinished(_TAG, [mark.name for mark in dead]):
        if run.status == "RUNNING":
            tracker.mark_cut_off(run.run_id, CUT_OFF)
    for mark in dead:
        with suppress(OSError):
            mark.unlink()


def _dead(tracker: Tracker, root: Path) -> list[Path]:
    """Return the marks of runs in the tracker whose process is gone."""
    # A name with a dot is of a file that is being written.
    marks = sorted(one for one in (root / _MARKS).glob("*") if not one.name.startswith("."))
    if not marks:
        return []
    try:
        locks = Locks(root)
    except CacheError:
        return []
    if not locks.work:
        return []
    mine = _text(tracker, locks)
    return [m for m in marks if _read(m) == mine and not locks.is_held_elsewhere(_lock(m.name))]


def _text(tracker: Tracker, locks: Locks) -> str:
    return "\n".join((*tracker.place, locks.name))


def _read(mark: Path) -> str | None:
    try:
        return mark.read_text(encoding="utf-8")
    except (OSError, ValueError):  # its run has ended since, or it is damaged
        return None


def _lock(name: str) -> str:
    return f"alone {name}"
