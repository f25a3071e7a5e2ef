"""Open the tracker that a configuration names, and the one of ``tracking=none``."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fxpart.errors import SpecError, nearest_names
from runner.config.sections import TrackingConfig
from runner.tracking.tracker import (
    Columns,
    LoggedRun,
    RunLog,
    RunStatus,
    Series,
    Tracker,
    UnsentRun,
)

__all__ = ["NoTracker", "open_tracker"]

_NAMES = ("mlflow", "none")


def open_tracker(config: TrackingConfig, root: Path, *, must_answer: bool = True) -> Tracker:
    """Return the tracker that `config` names, with its store open; `root` is where outputs lie.

    A process opens a store once, and gets the same tracker again. A store that need not answer, as
    for a job of a sweep that has begun, is tried again with each run.

    Raises `SpecError` for an unknown name and `TrackingError` for a store that does not work.
    """
    if config.name == "none":
        return NoTracker()
    if config.name != "mlflow":
        near = nearest_names(config.name, _NAMES)
        raise SpecError(f"there is no tracking {config.name!r}; {near}; choose one with tracking=")
    from runner.tracking.mlflow_tracker import shared_tracker  # MLflow takes 1 to 2 s

    return shared_tracker(config, root, must_answer=must_answer)


class _NoLog:
    run_id: str | None = None
    unsent: Path | None = None
    problem: str | None = None

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
    """Keeps nothing and needs no MLflow; see `Tracker` for what each method would do."""

    @property
    def place(self) -> tuple[str, str]:
        """Nowhere."""
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
        """Yield a run that keeps nothing."""
        yield _NoLog()

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> None:
        """Return no id."""

    def reopen_sweep(self, run_id: str) -> None:
        """Do nothing."""

    def log_sweep(
        self,
        parent_run_id: str | None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """Do nothing."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Do nothing."""

    def run(self, run_id: str) -> LoggedRun:
        """Raise `SpecError`: no run is known."""
        raise SpecError(
            f"there is no run {run_id!r}: tracking=none keeps none; use tracking=mlflow"
        )

    def read_artifact(self, run_id: str, path: str) -> None:
        """Return no file."""

    def runs(self, tags: Mapping[str, str]) -> list[LoggedRun]:
        """Return no run."""
        return []

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return no run."""
        return []

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return no run."""
        return {}

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return no run."""
        return []

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Do nothing."""

    def supersede(self, run_id: str) -> None:
        """Do nothing."""

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Do nothing."""

    def send(self, run: UnsentRun, folder: Path) -> None:
        """Do nothing; the run stays on disk."""

    def comparison_page(self, parent_run_id: str | None = None) -> None:
        """Return no page."""
