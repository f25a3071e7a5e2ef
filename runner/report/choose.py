"""Which sweep of an experiment a report is of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fxpart.errors import SpecError, nearest_names
from runner.report.from_store import sweep_from_runs, swept_keys
from runner.report.job_folders import job_folders
from runner.report.request import LATEST
from runner.report.rows import SweepData

if TYPE_CHECKING:
    from runner.tracking import LoggedRun

__all__ = ["LATEST", "RunSource", "all_runs", "chosen_sweep", "sweeps_of"]

_LEAST_PREFIX = 4
"""Characters of a run's id that may stand for it."""


class RunSource(Protocol):
    """What runs are read from."""

    def runs(self, tags: Mapping[str, str]) -> "list[LoggedRun]":
        """Return the runs that have all these tags with these values, the oldest first."""

    def runs_of_sweep(self, sweep_id: str) -> "list[LoggedRun]":
        """Return the runs that belong to a sweep, the oldest first."""


def sweeps_of(source: RunSource) -> "list[LoggedRun]":
    """Return the parent runs of an experiment's sweeps, the newest first."""
    return source.runs({"kind": "sweep"})[::-1]


def chosen_sweep(sweeps: "Sequence[LoggedRun]", asked: str, experiment: str) -> "LoggedRun":
    """Return the sweep that `asked` means: ``latest``, a run's id, or how only one id begins.

    Raises `SpecError` when there is none, or more than one.
    """
    if not sweeps:
        raise SpecError(
            f"experiment {experiment!r} has no sweep; run one with -m, or show single runs with"
            " --sweep all"
        )
    if asked == LATEST:
        return sweeps[0]
    wanted = asked if len(asked) >= _LEAST_PREFIX else f"{asked}?"
    found = [sweep for sweep in sweeps if sweep.run_id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise SpecError(
            f"{len(found)} sweeps of {experiment!r} begin with {asked!r}; give all of it"
        )
    ids = [sweep.run_id for sweep in sweeps]
    raise SpecError(
        f"experiment {experiment!r} has no sweep {asked!r}; {nearest_names(asked, ids)}"
    )


def all_runs(source: RunSource, sweeps: "Sequence[LoggedRun]", experiment: str) -> SweepData:
    """Return all jobs of an experiment as one sweep. Raises `SpecError` when there are none."""
    runs = source.runs({"kind": "run"})
    if not runs:
        raise SpecError(f"experiment {experiment!r} has no runs; run something in it first")
    swept = dict.fromkeys(key for sweep in reversed(sweeps) for key in swept_keys(sweep))
    roots = [Path(folder) for sweep in sweeps if (folder := sweep.tags.get("folder"))]
    return sweep_from_runs(
        runs,
        title=f"{experiment}: all runs",
        swept=tuple(swept),
        started_ms=min(run.start_ms for run in runs),
        folders=job_folders(roots),
    )
