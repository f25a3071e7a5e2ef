"""The tracker that keeps runs in MLflow. Importing this module is cheap, making one is not."""

import logging
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError
from runner.mlflow_store import open_store, refusals, sqlite_path
from runner.mlflow_values import batches, finite_metrics, legal_names, param_texts, tag_texts, thin
from runner.mlflow_view import (
    COLOR_TAG,
    RUN_COLORS,
    VIEW_TAG,
    comparison_view,
    page_fragment,
    view_key,
)
from runner.tracking import (
    Columns,
    ComparisonPage,
    RunLog,
    RunStatus,
    Series,
    TrackingConfig,
    TrackingError,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MlflowTracker"]

_log = logging.getLogger(__name__)
_FEASIBLE = "feasible"
_UI = "http://127.0.0.1:5000"


class _MlflowLog:
    """A run in the store."""

    def __init__(self, client: "MlflowClient", uri: str, run_id: str) -> None:
        self.run_id: str = run_id
        self.metric_names: set[str] = set()
        self._client = client
        self._uri = uri

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
        with refusals(self._uri):
            self.write(metrics=metrics, series=series, tags=tags)
            for name, columns in (tables or {}).items():
                data = {column: list(cells) for column, cells in columns.items()}
                self._client.log_table(self.run_id, data, f"{name}.json")
            if artifacts_dir is not None and artifacts_dir.is_dir():
                self._keep(artifacts_dir, left_out)

    def _keep(self, folder: Path, left_out: str | None) -> None:
        """Copy what is in `folder`, at once where all of it is kept."""
        if left_out is None or not (folder / left_out).exists():
            self._client.log_artifacts(self.run_id, str(folder))
            return
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != left_out:
                self._client.log_artifacts(self.run_id, str(path), path.name)
            elif path.is_file():
                self._client.log_artifact(self.run_id, str(path))

    def write(
        self,
        *,
        params: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
        series: Mapping[str, Series] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send it all in as few requests as possible: one at a time costs up to 50 times more."""
        from mlflow.entities import Metric, Param, RunTag

        now_ms = int(time.time() * 1000)
        numbers = [Metric(k, v, now_ms, 0) for k, v in finite_metrics(metrics or {}).items()]
        names = legal_names(series or {})
        for name, points in (series or {}).items():
            numbers += [Metric(names[name], v, now_ms, step) for step, v in thin(points)]
        texts = [Param(k, v) for k, v in param_texts(params or {}).items()]
        labels = [RunTag(k, v) for k, v in tag_texts(tags or {}).items()]
        for batch in batches(numbers, texts, labels):
            self._client.log_batch(self.run_id, batch.metrics, batch.params, batch.tags)
        self.metric_names.update(number.key for number in numbers)

    def close(self, status: RunStatus) -> None:
        with refusals(self._uri):
            self._client.set_terminated(self.run_id, status)

    def close_failed(self, error: BaseException) -> None:
        """Mark the run with what went wrong; the error itself matters more than the mark."""
        interrupted = isinstance(error, KeyboardInterrupt)
        failed = not interrupted and _FEASIBLE not in self.metric_names
        try:
            with refusals(self._uri):
                self.write(
                    tags={"error": _error_text(error)}, metrics={_FEASIBLE: 0.0} if failed else {}
                )
                self._client.set_terminated(self.run_id, "KILLED" if interrupted else "FAILED")
        except TrackingError as also:
            # A store that broke is what is raised already.
            level = logging.DEBUG if isinstance(error, TrackingError) else logging.WARNING
            _log.log(level, "the run %s could not be marked as failed: %s", self.run_id, also)


def _error_text(error: BaseException) -> str:
    said = str(error).strip()
    if isinstance(error, FxpartError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class MlflowTracker:
    """Keeps runs in one experiment of an MLflow store. Raises `TrackingError` when it fails."""

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        """Open the store, and make it first if it is missing."""
        self._experiment = config.experiment
        self._client, self._uri, self._experiment_id = open_store(config, root)

    @contextmanager
    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
    ) -> Iterator[RunLog]:
        """Open a run; see `Tracker.start`.

        Parameters go first, so that a process that is killed outright still shows what it was.
        """
        parent = {"mlflow.parentRunId": parent_run_id} if parent_run_id else {}
        run = self._create(run_name, {"kind": "run", **parent, **(tags or {})})
        try:
            with refusals(self._uri):
                run.write(params=params)
            yield run
            run.close("FINISHED")
        except BaseException as error:
            run.close_failed(error)
            raise

    def _create(self, run_name: str, tags: Mapping[str, str]) -> _MlflowLog:
        with refusals(self._uri):
            made = self._client.create_run(
                self._experiment_id, run_name=run_name, tags=tag_texts(tags)
            )
        return _MlflowLog(self._client, self._uri, made.info.run_id)

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a sweep; see `Tracker.start_sweep`."""
        return self._create(name, {"kind": "sweep", **(tags or {})}).run_id

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run of a sweep; see `Tracker.finish_sweep`."""
        if parent_run_id is not None:
            _MlflowLog(self._client, self._uri, parent_run_id).close(status)

    def finished_runs(self, tag: str) -> dict[str, str]:
        """Return ``{value of tag: run id}``; of equal values the newest run. One search."""
        found: dict[str, str] = {}
        token: str | None = None
        with refusals(self._uri):
            while True:
                page = self._client.search_runs(
                    [self._experiment_id],
                    "attributes.status = 'FINISHED' and tags.kind = 'run'",
                    max_results=5000,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
                for run in page:
                    value = run.data.tags.get(tag)
                    if value is not None:
                        found.setdefault(value, run.info.run_id)
                token = page.token
                if not token:
                    return found

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage:
        """Write the view and return its address; without the view the address still opens."""
        try:
            with refusals(self._uri):
                self._write_view(parent_run_id)
        except TrackingError as error:
            _log.warning("the comparison page keeps MLflow's own columns: %s", error)
        server, command = self._uri, None
        if not self._uri.startswith("http"):
            server, command = _UI, _ui_command(self._uri)
        table, charts = (
            server + page_fragment(self._experiment_id, parent_run_id, charts=charts)
            for charts in (False, True)
        )
        return ComparisonPage(table, charts, command)

    def _write_view(self, parent_run_id: str | None) -> None:
        title, created_ms = "All runs", 0
        if parent_run_id:
            parent = self._client.get_run(parent_run_id).info
            title, created_ms = parent.run_name or parent_run_id, parent.start_time
            self._color_runs(parent_run_id)
        view = comparison_view(parent_run_id, title, created_ms)
        key = VIEW_TAG + view_key(parent_run_id)
        tags: dict[str, Any] = self._client.get_experiment(self._experiment_id).tags
        if tags.get(key) != view:
            self._client.set_experiment_tag(self._experiment_id, key, view)

    def _color_runs(self, parent_run_id: str) -> None:
        """Give the first runs of a sweep colours that differ; one that has a colour keeps it."""
        runs = self._client.search_runs(
            [self._experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent_run_id}'",
            max_results=len(RUN_COLORS),
            order_by=["metrics.latency_ms ASC"],
        )
        for run, color in zip(runs, RUN_COLORS, strict=False):
            if COLOR_TAG not in run.data.tags:
                self._client.set_tag(run.info.run_id, COLOR_TAG, color)


def _ui_command(uri: str) -> str:
    """Return the command that serves the store, with the `mlflow` of this very Python."""
    beside = Path(sys.executable).with_name("mlflow")
    on_path = shutil.which("mlflow")
    program = "mlflow"
    if not (on_path and Path(on_path) == beside) and beside.exists():
        here = Path.cwd()
        program = str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)
    database = sqlite_path(uri)
    if database is not None and database.is_relative_to(Path.cwd()):
        uri = f"sqlite:///{database.relative_to(Path.cwd())}"
    return f"{shlex.quote(program)} ui --backend-store-uri {shlex.quote(uri)}"
