"""Attempts that came to nothing: marked, and taken out of the tables of their sweeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.sweeps.locks import LOCKS_TAG, Locks
from runner.tracking import LoggedRun, Tracker

__all__ = ["CUT_OFF", "SetAside", "set_aside"]

CUT_OFF = "cut off: its process ended before it did"
"""What is said of a run whose process was killed."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """What became of the attempts at some jobs that came to nothing."""

    sweeps: Mapping[str, tuple[str, ...]]
    """By key, the sweeps that an attempt was taken out of."""
    left: frozenset[str]
    """The keys of jobs that another process may be at. It may die yet."""


def set_aside(
    tracker: Tracker,
    keys: Sequence[str],
    locks: Locks,
    *,
    sweep: str | None = None,
    holding: bool = False,
) -> SetAside:
    """Mark the attempts at these jobs that came to nothing, of one `sweep` or of all.

    Left alone is a run that another process is at (whoever wants its job waits for its lock; with
    `holding`, the caller has done so), one that was started in a folder whose locks cannot be seen
    from here, and somebody's single run, which is part of no sweep. Raises `TrackingError`.
    """
    sweeps: dict[str, tuple[str, ...]] = {}
    left = set()
    for run in tracker.unfinished("config_key", keys):
        mine = tuple(run.tags.get("sweeps", "").split())
        if not mine or sweep not in (None, *mine):
            continue
        key = run.tags["config_key"]
        if run.status == "FAILED":
            tracker.supersede(run.run_id)
        elif _may_be_at_work(run, locks, holding=holding):
            left.add(key)
            continue
        else:
            tracker.mark_cut_off(run.run_id, CUT_OFF)
        sweeps[key] = (*sweeps.get(key, ()), *mine)
    return SetAside(sweeps, frozenset(left))


def _may_be_at_work(run: LoggedRun, locks: Locks, *, holding: bool) -> bool:
    if run.status != "RUNNING":
        return False
    if run.tags.get(LOCKS_TAG) != locks.name:
        return True
    return not holding and locks.is_held_elsewhere(run.tags["config_key"])
