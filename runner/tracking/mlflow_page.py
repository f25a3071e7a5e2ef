"""The comparison page of a store: its view written, its address and the command that serves it."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.passwords import password_to_fill_in, without_password
from runner.tracking.mlflow_store import sqlite_path
from runner.tracking.mlflow_view import (
    COLOR_TAG,
    RUN_COLORS,
    VIEW_TAG,
    comparison_view,
    page_fragment,
    sweep_filter,
    sweep_order,
    view_key,
)
from runner.tracking.tracker import ComparisonPage

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["page_of", "write_view"]

_UI = "http://127.0.0.1:5000"


def page_of(uri: str, experiment_id: str, parent_run_id: str | None) -> ComparisonPage:
    """Return where the page is, of one sweep or of all runs; nothing is asked."""
    server, command = without_password(uri), None
    if not uri.startswith("http"):
        server, command = _UI, _ui_command(uri)
    table, charts = (
        server + page_fragment(experiment_id, parent_run_id, charts=charts)
        for charts in (False, True)
    )
    return ComparisonPage(table, charts, command)


def write_view(client: "MlflowClient", experiment_id: str, parent_run_id: str | None) -> None:
    """Write the view of one sweep, or of all runs, where it is not there already."""
    if parent_run_id:
        parent = client.get_run(parent_run_id)
        known: dict[str, str] = parent.data.tags
        title, sweep_id = parent.info.run_name or parent_run_id, known.get("sweep_id")
        swept = _swept(known)
        _color_runs(client, experiment_id, sweep_filter(parent_run_id, sweep_id), swept)
        view = comparison_view(parent_run_id, title, parent.info.start_time, sweep_id, swept)
    else:
        view = comparison_view(None, "All runs", 0)
    key = VIEW_TAG + view_key(parent_run_id)
    tags: dict[str, Any] = client.get_experiment(experiment_id).tags
    if tags.get(key) != view:
        client.set_experiment_tag(experiment_id, key, view)


def _swept(tags: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(json.loads(tags.get("swept", "[]")))
    except ValueError:  # a tag that was cut off, for its length
        return ()


def _color_runs(
    client: "MlflowClient", experiment_id: str, of_sweep: str, swept: Sequence[str]
) -> None:
    """Give the first runs of a sweep colours that differ; one that has a colour keeps it."""
    metric, least_first = sweep_order(swept)
    runs = client.search_runs(
        [experiment_id],
        of_sweep,
        max_results=len(RUN_COLORS),
        order_by=[f"metrics.{metric} {'ASC' if least_first else 'DESC'}"],
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
    return f"{shlex.quote(program)} ui --backend-store-uri {shlex.quote(password_to_fill_in(uri))}"
