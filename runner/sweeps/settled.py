"""What is settled already, and so is not run again."""

from collections.abc import Collection, Mapping
from pathlib import Path

from fxpart.errors import FxpartError
from runner.files import read_result
from runner.job import RESULT_FILE
from runner.sweeps.jobs import JobEnd
from runner.tracking import LoggedRun, Tracker

__all__ = ["settled_ends", "settled_in_files"]

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
    return {key: _end_of_run(run) for key, run in settled.items()}


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


def _end_of_run(run: LoggedRun) -> JobEnd:
    outcome, error = run.tags["outcome"], run.tags.get("error")
    return JobEnd(outcome, run.metrics, error, known=True, run_id=run.run_id)
