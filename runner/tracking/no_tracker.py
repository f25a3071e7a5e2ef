"""The tracker of ``tracking=none``: it keeps nothing, and needs no MLflow."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import SpecError
from runner.tracking.tracker import Columns, LoggedRun, RunLog, RunStatus, Series

if TYPE_CHECKING:
    from runner.tracking.tracker import UnsentRun

__all__ = ["NoTracker"]


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
    """Keeps nothing; see `Tracker` for what each method would do."""

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
        """Yield a run that forgets what it is told."""
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
        """Return nothing: no file is kept."""

    def runs(self, tags: Mapping[str, str]) -> list[LoggedRun]:
        """Return nothing: no run is known."""
        return []

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return nothing."""
        return []

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return nothing."""
        return {}

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return nothing."""
        return []

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Do nothing."""

    def supersede(self, run_id: str) -> None:
        """Do nothing."""

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Do nothing."""

    def send(self, run: "UnsentRun", folder: Path) -> None:
        """Do nothing; the run stays where it is kept."""

    def comparison_page(self, parent_run_id: str | None = None) -> None:
        """Return no page."""
