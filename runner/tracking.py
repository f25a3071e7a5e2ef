"""Where runs are kept: one protocol, an MLflow tracker, and one that keeps nothing.

Importing this module does not import MLflow; opening a tracker does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from fxpart.errors import FxpartError, SpecError, nearest_names

__all__ = [
    "Columns",
    "ComparisonPage",
    "NoTracker",
    "RunLog",
    "RunStatus",
    "Series",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "open_tracker",
]

Series = Sequence[tuple[int, float]]
"""A metric over steps: ``(step, value)``, steps rising."""
Columns = Mapping[str, Sequence[object]]
"""A table: name of a column to its cells, all columns of one length."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

_NAMES = ("mlflow", "none")


class TrackingError(FxpartError, RuntimeError):
    """A store of runs that cannot be reached, read or written."""


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class TrackingConfig:
    """Which tracker to use, and where it keeps runs."""

    name: str = "mlflow"
    """``mlflow`` or ``none``."""
    uri: str | None = None
    """Tracking URI of MLflow. None: the environment's ``MLFLOW_TRACKING_URI``, or else the sqlite
    file ``outputs/mlflow.db`` below the root."""
    experiment: str = "fxpart"


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """Where runs are compared, and what to start first."""

    url: str
    """Opens the table of runs."""
    charts_url: str
    """Opens the same runs as charts."""
    command: str | None
    """Serves the page from a store that is a file; None when a server is already there."""


class RunLog(Protocol):
    """One run that is under way."""

    @property
    def run_id(self) -> str | None:
        """The store's name for the run; None when nothing is kept."""

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
        """Keep what the run found; values that are not finite are left out.

        Of `artifacts_dir` the folder named `left_out` is not kept. A long series is thinned to the
        maximum of each stretch. Raises `TrackingError`.
        """


class Tracker(Protocol):
    """Keeps runs. All methods raise `TrackingError` when the store fails."""

    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
    ) -> AbstractContextManager[RunLog]:
        """Return a context in which the run is open.

        An exception marks the run FAILED (an interrupt: KILLED) with the tag ``error``, and goes
        on; so that a comparison shows it, an error also logs ``feasible`` 0.
        """

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str | None:
        """Open a run that others name as their parent, and return its id."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run."""

    def finished_runs(self, tag: str) -> dict[str, str]:
        """Return ``{value of tag: run id}`` of all finished runs that have `tag`."""

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Prepare the page that compares one sweep's runs, or all runs, and say where it is."""


class _NoLog:
    run_id: str | None = None

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
        pass


class NoTracker:
    """Keeps nothing; needs no MLflow."""

    @contextmanager
    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
    ) -> Iterator[RunLog]:
        """Yield a run that forgets what it is told."""
        yield _NoLog()

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> None:
        """Return no id."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Do nothing."""

    def finished_runs(self, tag: str) -> dict[str, str]:
        """Return nothing: no run is known."""
        return {}

    def comparison_page(self, parent_run_id: str | None = None) -> None:
        """Return no page."""


def open_tracker(config: TrackingConfig, root: Path) -> Tracker:
    """Return the tracker that `config` names, its store ready; `root` is where outputs lie.

    Raises `SpecError` for an unknown name and `TrackingError` for a store that does not work.
    """
    if config.name == "none":
        return NoTracker()
    if config.name != "mlflow":
        near = nearest_names(config.name, _NAMES)
        raise SpecError(f"there is no tracking {config.name!r}; {near}; choose one with tracking=")
    from runner.mlflow_tracker import MlflowTracker  # MLflow takes 1 to 2 s

    return MlflowTracker(config, root)
