"""What of a sweep is missing: settled jobs are left out, attempts that failed set aside."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fxpart.errors import FxpartError
from runner.files import read_result
from runner.job import RESULT_FILE
from runner.sweeps.jobs import JobEnd
from runner.sweeps.locks import Locks
from runner.sweeps.one_job import end_of_run
from runner.tracking import Tracker

__all__ = ["set_aside", "settled_ends", "settled_in_files"]

_CUT_OFF = "cut off: its process ended before it did"
_SETTLED = ("finished", "infeasible")


def settled_ends(tracker: Tracker, keys: Collection[str], sweep: str) -> Mapping[str, JobEnd]:
    """Return by key what came of the jobs that are settled, whichever run did it.

    Those runs join the sweep, so that its tables show them. Raises `TrackingError`.
    """
    settled = tracker.settled("config_key", keys)
    strangers = [
        run.run_id for run in settled.values() if f" {sweep} " not in run.tags.get("sweeps", "")
    ]
    tracker.join_sweep(strangers, sweep)
    return {key: end_of_run(run) for key, run in settled.items()}


def settled_in_files(folder: Path, keys: Collection[str], sweep: str) -> Mapping[str, JobEnd]:
    """Return the same of the sweep's results in `folder`, for a sweep that no store keeps."""
    found: dict[str, JobEnd] = {}
    for path in sorted(folder.rglob(RESULT_FILE)):
        try:
            said = read_result(path)
        except FxpartError:
            continue  # half a file is no result: the job is run again
        key = said.get("key")
        if key in keys and said.get("sweep") == sweep and said["status"] in _SETTLED:
            found[str(key)] = JobEnd(said["status"], said["metrics"], said["error"], known=True)
    return found


def set_aside(tracker: Tracker, keys: Sequence[str], locks: Locks) -> None:
    """Mark the runs of earlier attempts at these jobs, so that no table counts them.

    A run that another process is at is left alone: whoever wants its job waits for its lock.
    Raises `TrackingError`.
    """
    for run in tracker.unfinished("config_key", keys):
        if not run.tags.get("sweeps"):
            continue  # somebody's single run, which is part of no sweep
        if run.status == "FAILED":
            tracker.supersede(run.run_id)
        elif not locks.is_held_elsewhere(run.tags["config_key"]):
            tracker.mark_cut_off(run.run_id, _CUT_OFF)
