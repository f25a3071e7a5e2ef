"""Trackers: what each does, the one that keeps nothing, and the records of runs. No MLflow here."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fxpart.errors import SpecError
from runner.output.terminal import show

__all__ = [
    "ALL_BUT_INPUTS",
    "INPUTS_FOLDER",
    "Columns",
    "ComparisonPage",
    "LoggedRun",
    "RunLog",
    "RunStatus",
    "Runs",
    "Series",
    "Tracker",
    "UnsentRun",
    "announce_page",
    "swept_keys",
]

Series = Sequence[tuple[int, float]]
"""A metric over steps: ``(step, value)``, in order of rising steps."""
Columns = Mapping[str, Sequence[object]]
"""A table: the name of each column to its cells; all columns have the same length."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
INPUTS_FOLDER = "inputs"
ALL_BUT_INPUTS = "all but inputs/"
"""A value of `left_out`: keep the folder of inputs alone. No folder has this name."""


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """Where runs are compared."""

    url: str
    """Opens the table of runs."""
    charts_url: str
    """Opens the same runs as charts."""
    command: str | None
    """Serves the page from a store that is a database; None where the store is a server."""


def announce_page(page: ComparisonPage | None) -> None:
    """Print where runs are compared in MLflow, and the command that serves it if one is needed."""
    if page is None:
        return
    if page.command:
        show(f"dashboard: {page.command}")
    show(f"compare:   {page.url}", f"charts:    {page.charts_url}")


@dataclass(frozen=True, eq=False, slots=True)
class LoggedRun:
    """A run as the store has it. `metrics` has the last value of a metric over steps."""

    run_id: str
    name: str
    status: str
    """``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    start_ms: int
    """Milliseconds since 1970, as is the end."""
    end_ms: int | None

    @property
    def sweeps(self) -> tuple[str, ...]:
        """The ids of the sweeps that the run belongs to."""
        return tuple(self.tags.get("sweeps", "").split())


def swept_keys(tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys that a sweep gives several values, by the tags of its run, in order."""
    try:
        keys = json.loads(tags.get("swept", "[]"))
    except ValueError:  # a tag that was cut off for its length
        return ()
    return tuple(str(key) for key in keys) if isinstance(keys, list) else ()


class RunLog:
    """One run that is under way; this one is of a tracker that keeps nothing."""

    run_id: str | None = None
    """The store's id of the run; None when nothing is tracked, or the store is gone."""
    problem: str | None = None
    """Why a run that is closed is not in the store, which file keeps it and how to send that, in
    one line; None if it is there."""

    def log(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        series: Mapping[str, Series] | None = None,
        tables: Mapping[str, Columns] | None = None,
        artifacts_dir: Path | None = None,
        left_out: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add results to the run; values that are not finite are left out.

        They go to the store when the run is closed. Of `artifacts_dir` the folder named `left_out`
        is not kept; with `ALL_BUT_INPUTS` only that of inputs is. A long series is thinned to the
        maximum of each stretch.
        """


@dataclass(frozen=True, eq=False, slots=True)
class UnsentRun:
    """One run that has ended, with all that is to be logged; times in milliseconds since 1970."""

    record_id: str
    """Also a tag of the run, by which it is found where a part of it was sent before."""
    name: str
    uri: str
    """The store that the run is meant for, without a password."""
    experiment: str
    status: RunStatus
    start_ms: int
    end_ms: int
    run_id: str | None = None
    """The store's id of the run, if it was made before the store went away."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All at `end_ms`, as are the points of `series`: a point that is sent twice is one point."""
    series: Mapping[str, Series] = field(default_factory=dict)
    tables: Mapping[str, Columns] = field(default_factory=dict)
    artifacts: str | None = None
    """The folder of the run's files, relative to the folder that the run is kept in."""
    left_out: str | None = None
    """The folder in `artifacts` that is not logged, or `ALL_BUT_INPUTS`."""

    @property
    def place(self) -> tuple[str, str]:
        """The store, without its password, and the experiment: a `Tracker.place`."""
        return self.uri, self.experiment


class Runs:
    """The runs of an experiment: found, and marked where they have no result; here there are none.

    Methods of those in a store raise `TrackingError` when it fails.
    """

    def run(self, run_id: str) -> LoggedRun:
        """Return one run. Raises `SpecError` when there is none of that id."""
        raise SpecError(
            f"there is no run {run_id!r}: tracking=none keeps none; use tracking=mlflow"
        )

    def runs(self, tags: Mapping[str, str], status: str | None = None) -> list[LoggedRun]:
        """Return the runs with all these tags, of that `status` if one is given, the oldest first.

        Each tag has the value that is given.
        """
        return []

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, those of others too, the oldest first."""
        return []

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return, by value of `tag`, the newest run whose outcome is final, and that `stands`."""
        return {}

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values that have no result, the oldest first."""
        return []

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died: KILLED, and no longer of its sweep."""

    def supersede(self, run_id: str) -> None:
        """Take a failed run, whose job is run again, out of its sweep; its error stays."""

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Note that these runs belong to a sweep too."""


class Tracker(Runs):
    """Keeps runs; this one keeps none, as ``tracking=none`` asks.

    Methods of trackers that keep them raise `TrackingError` when the store fails.
    """

    @property
    def place(self) -> tuple[str, str]:
        """The store, without its password, and the experiment; empty where nothing is kept."""
        return "", ""

    @contextmanager
    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
        folder: Path | None = None,
    ) -> Iterator[RunLog]:
        """Open a run for the block; it gets the tag ``outcome`` at its end.

        An exception marks the run FAILED (an interrupt: KILLED) with the tag ``error``, and is
        raised again. An error also logs ``feasible`` 0, so that comparisons show the run.

        With a `folder`, a store that fails raises nothing: the run is kept there, and
        `RunLog.problem` says so once the run is closed.
        """
        yield RunLog()

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str | None:
        """Open the parent run of a sweep and return its id; None where nothing is kept."""
        return None

    def reopen_sweep(self, run_id: str) -> None:
        """Mark a parent run as running again."""

    def log_sweep(
        self,
        parent_run_id: str | None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """Add to the parent run; `files` become artifacts under their own names."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run."""

    def read_artifact(self, run_id: str, path: str) -> bytes | None:
        """Return the content of a run's file, None when the run has no file at `path`."""
        return None

    def send(self, run: UnsentRun, folder: Path) -> None:
        """Log a run that was kept in `folder`; one that the store has in part is completed."""

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Prepare the page that compares one sweep's runs, or all runs; return its address."""
        return None
