"""The interface of trackers, one that stores nothing, and records of runs. No MLflow here."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fxpart.errors import SpecError
from runner.output.metrics import BY_OBJECTIVE
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
    "shared_objective",
    "swept_keys",
]

Series = Sequence[tuple[int, float]]
"""A metric over steps: ``(step, value)`` pairs with ascending steps."""
Columns = Mapping[str, Sequence[object]]
"""A table: cells by column name; all columns have the same length."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
INPUTS_FOLDER = "inputs"
ALL_BUT_INPUTS = "all but inputs/"
"""A value of `left_out` that keeps only the folder of inputs. No folder has this name."""


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """The page that compares runs."""

    url: str
    """Address of the table of runs."""
    charts_url: str
    """Address of the charts of the same runs."""
    command: str | None
    """The command that serves the page from a database; None if the store is a server."""


def announce_page(page: ComparisonPage | None) -> None:
    """Print the address of the comparison page, and the command that serves it if needed."""
    if page is None:
        return
    if page.command:
        show(f"dashboard: {page.command}")
    show(f"compare:   {page.url}", f"charts:    {page.charts_url}")


@dataclass(frozen=True, eq=False, slots=True)
class LoggedRun:
    """A run in the store. `metrics` has the last value of a metric over steps."""

    run_id: str
    name: str
    status: str
    """``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    start_ms: int
    """Start in milliseconds since 1970, like `end_ms`."""
    end_ms: int | None

    @property
    def sweeps(self) -> tuple[str, ...]:
        """The ids of the sweeps that the run belongs to."""
        return tuple(self.tags.get("sweeps", "").split())


def swept_keys(tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys with several values in a sweep, in order, from the tags of its run."""
    try:
        keys = json.loads(tags.get("swept", "[]"))
    except ValueError:  # a tag truncated for its length
        return ()
    return tuple(str(key) for key in keys) if isinstance(keys, list) else ()


def shared_objective(tags: Mapping[str, str]) -> str:
    """Return the objective that the command of a sweep gives to all jobs, from its run's tags."""
    try:
        overrides = json.loads(tags.get("overrides", "[]"))
    except ValueError:  # a tag truncated for its length
        return "latency"
    listed = overrides if isinstance(overrides, list) else []
    given = [str(override).partition("=") for override in listed]
    names = [name for key, _, name in given if key == "objective" and name in BY_OBJECTIVE]
    return names[-1] if names else "latency"


class RunLog:
    """One open run. This base class is for a tracker that stores nothing."""

    run_id: str | None = None
    """The store's id of the run; None without tracking, or if the store failed."""
    problem: str | None = None
    """Why a closed run is not in the store, which file has it and how to send that, in one line;
    None if it is in the store."""

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
        """Add results to the run, without values that are not finite.

        They are sent to the store when the run is closed. The folder `left_out` in `artifacts_dir`
        is not stored; with `ALL_BUT_INPUTS`, only that of inputs is. A long series is thinned to
        the maximum of each stretch.
        """


@dataclass(frozen=True, eq=False, slots=True)
class UnsentRun:
    """A run that has ended, with everything to log; times are in milliseconds since 1970."""

    record_id: str
    """Also a tag of the run, which finds it if a part of it was sent before."""
    name: str
    uri: str
    """The store that the run is meant for, without its password."""
    experiment: str
    status: RunStatus
    start_ms: int
    end_ms: int
    run_id: str | None = None
    """The store's id of the run, if it was created before the store failed."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged at time `end_ms`, like the points of `series`, so that resending adds no points."""
    series: Mapping[str, Series] = field(default_factory=dict)
    tables: Mapping[str, Columns] = field(default_factory=dict)
    artifacts: str | None = None
    """The folder of the run's files, relative to the folder with the unsent run."""
    left_out: str | None = None
    """The folder in `artifacts` that is not logged, or `ALL_BUT_INPUTS`."""

    @property
    def place(self) -> tuple[str, str]:
        """The URI of the store, without its password, and the experiment: a `Tracker.place`."""
        return self.uri, self.experiment


class Runs:
    """The runs of an experiment: finding them, and marking those without a result.

    This base class has no runs. The methods of a store raise `TrackingError` if it fails.
    """

    def run(self, run_id: str) -> LoggedRun:
        """Return one run. Raises `SpecError` if the id is unknown."""
        raise SpecError(
            f"there is no run {run_id!r}: tracking=none keeps none; use tracking=mlflow"
        )

    def runs(self, tags: Mapping[str, str], status: str | None = None) -> list[LoggedRun]:
        """Return the runs with all these tag values, and with `status` if given, oldest first."""
        return []

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, including shared ones, oldest first."""
        return []

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return the newest run with a final outcome that `stands`, by value of `tag`."""
        return {}

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values and no result, oldest first."""
        return []

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died as KILLED, and remove it from its sweep."""

    def supersede(self, run_id: str) -> None:
        """Remove a failed run, whose job is run again, from its sweep, keeping its error."""

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Add these runs to a sweep."""


class Tracker(Runs):
    """Stores runs. This base class stores none, as for ``tracking=none``.

    The methods of trackers with a store raise `TrackingError` if it fails.
    """

    @property
    def place(self) -> tuple[str, str]:
        """The URI of the store, without its password, and the experiment; empty without a store."""
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

        With a `folder`, a failing store raises nothing: the run is written there, and
        `RunLog.problem` says so once the run is closed.
        """
        yield RunLog()

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str | None:
        """Open the parent run of a sweep and return its id; None without a store."""
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
        """Add results to the parent run; `files` become artifacts with the same names."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run."""

    def read_artifact(self, run_id: str, path: str) -> bytes | None:
        """Return the content of a run's file at `path`; None if there is none."""
        return None

    def send(self, run: UnsentRun, folder: Path) -> None:
        """Log an unsent run from `folder`, completing it if the store has a part of it."""

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Prepare the page that compares the runs of a sweep, or all runs; return its address."""
        return None
