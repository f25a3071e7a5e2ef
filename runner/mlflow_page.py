"""The comparison page of a store: its view written, its address and the command that serves it."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.mlflow_runs import PARENT
from runner.mlflow_store import sqlite_path
from runner.mlflow_view import (
    COLOR_TAG,
    RUN_COLORS,
    VIEW_TAG,
    comparison_view,
    page_fragment,
    view_key,
)
from runner.tracking import ComparisonPage

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["page_of", "write_view"]

_UI = "http://127.0.0.1:5000"


def page_of(uri: str, experiment_id: str, parent_run_id: str | None) -> ComparisonPage:
    """Return where the page is, of one sweep or of all runs; nothing is asked."""
    server, command = uri, None
    if not uri.startswith("http"):
        server, command = _UI, _ui_command(uri)
    table, charts = (
        server + page_fragment(experiment_id, parent_run_id, charts=charts)
        for charts in (False, True)
    )
    return ComparisonPage(table, charts, command)


def write_view(client: "MlflowClient", experiment_id: str, parent_run_id: str | None) -> None:
    """Write the view of one sweep, or of all runs, where it is not there already."""
    title, created_ms = "All runs", 0
    if parent_run_id:
        parent = client.get_run(parent_run_id).info
        title, created_ms = parent.run_name or parent_run_id, parent.start_time
        _color_runs(client, experiment_id, parent_run_id)
    view = comparison_view(parent_run_id, title, created_ms)
    key = VIEW_TAG + view_key(parent_run_id)
    tags: dict[str, Any] = client.get_experiment(experiment_id).tags
    if tags.get(key) != view:
        client.set_experiment_tag(experiment_id, key, view)


def _color_runs(client: "MlflowClient", experiment_id: str, parent_run_id: str) -> None:
    """Give the first runs of a sweep colours that differ; one that has a colour keeps it."""
    runs = client.search_runs(
        [experiment_id],
        f"tags.`{PARENT}` = '{parent_run_id}'",
        max_results=len(RUN_COLORS),
        order_by=["metrics.latency_ms ASC"],
    )
    for run, color in zip(runs, RUN_COLORS, strict=False):
        if COLOR_TAG not in run.data.tags:
            client.set_tag(run.info.run_id, COLOR_TAG, color)


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
