"""The comparison page: MLflow's table of runs with our columns, order and charts.

MLflow's default page shows neither parameters nor metrics. Its "share view" button stores a view as
JSON in a tag of the experiment, ``mlflow.sharedViewState.<key>``, and a URL with the key opens it;
we write that tag ourselves. It is not documented, so callers must not fail if it cannot be written.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.passwords import password_to_fill_in, without_password
from runner.output.metrics import BY_NAME, BY_OBJECTIVE, page_columns
from runner.tracking.mlflow_store import sqlite_path
from runner.tracking.tracker import ComparisonPage, shared_objective, swept_keys

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = [
    "COLOR_TAG",
    "RUN_COLORS",
    "VIEW_TAG",
    "comparison_view",
    "page_of",
    "sweep_filter",
    "write_view",
]

VIEW_TAG = "mlflow.sharedViewState."
COLOR_TAG = "mlflow.runColor"
RUN_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#332288",
    "#999933",
    "#882255",
    "#44AA99",
    "#B8A600",
    "#666666",
)
"""Colours that colour-blind people can distinguish (after Okabe and Ito, and Tol). MLflow derives
its colours from run ids, and two of four runs often get the same."""

_FIXED_WIDTHS = {"attributes.`Run Name`": 95, "runDateAndNestInfo": 80}
"""Widths of MLflow's first columns: the name, and when and how the run ended."""
# Order and widths in pixels: two choices and the first three costs fit next to MLflow's panels on a
# screen of 1440. MLflow shows no column for a metric that no run has.
_COLUMN_WIDTHS = {
    "params.`mode`": 95,
    "params.`devices`": 85,
    **{f"metrics.`{name}`": width for name, width in page_columns(common=True).items()},
    "params.`transfer_rate`": 105,
    "params.`model`": 120,
    "params.`plan`": 200,
    "params.`schedule`": 95,
    "params.`microbatches`": 110,
    **{f"metrics.`{name}`": width for name, width in page_columns(common=False).items()},
    "tags.`error`": 300,
}
_SIZES = ("model.batch_size", "prompt_len", "output_len", "microbatches", "schedule")
"""Runs are compared by a rate if one of these keys is swept."""
_FINISHED = "attributes.status = 'FINISHED'"
_COSTS, _CHOICES = "fxpart-costs", "fxpart-choices"
_MOST_RUNS = 20


def _view_key(parent_run_id: str | None) -> str:
    """Return the name of the view of one sweep, or of the whole experiment."""
    return f"fxpart-{parent_run_id}" if parent_run_id else "fxpart-all"


def sweep_filter(parent_run_id: str | None, sweep_id: str | None = None) -> str:
    """Return MLflow's filter for the runs of a sweep, or for all runs but sweeps and cut-off ones.

    A run may belong to several sweeps: its tag ``sweeps`` lists them, each between spaces.
    """
    if parent_run_id is None:
        return "tags.`kind` = 'run'"
    if sweep_id is None:
        return f"tags.`mlflow.parentRunId` = '{parent_run_id}'"
    return f"tags.`kind` = 'run' AND tags.`sweeps` LIKE '% {sweep_id} %'"


def _columns(swept: Sequence[str], metric: str) -> Mapping[str, int]:
    """Return the widths of the columns, in order, starting with the swept keys.

    `metric` orders the runs; it comes next unless it has a place of its own.
    """
    first = {f"params.`{key}`": _width(key) for key in swept}
    if f"metrics.`{metric}`" not in _COLUMN_WIDTHS:
        first[f"metrics.`{metric}`"] = 90
    return {**first, **{k: wide for k, wide in _COLUMN_WIDTHS.items() if k not in first}}


def _sweep_order(
    swept: Sequence[str], objective: str, logged: Container[str] = ()
) -> tuple[str, bool]:
    """Return the metric to order runs by, and whether the smallest comes first.

    Latencies of different sizes are not comparable, nor are those of microbatches, and those of
    generations are of their last token. The order is the same as in our own ranking, if all runs
    have the metrics `logged` by one of them.
    """
    metric, _ = BY_OBJECTIVE[objective]
    by_rate = "step_ms" in logged or ("ttft_ms" in logged and "tpot_ms" in logged)
    if (by_rate or any(key in swept for key in _SIZES)) and objective in ("latency", "throughput"):
        metric = "tokens_per_s" if "tpot_ms" in logged else "examples_per_s"
    return metric, BY_NAME[metric].better == "lower"


def _width(key: str) -> int:
    return _COLUMN_WIDTHS.get(f"params.`{key}`") or max(90, 8 * len(key) + 20)


def comparison_view(
    parent_run_id: str | None,
    title: str,
    created_ms: int,
    sweep_id: str | None = None,
    swept: Sequence[str] = (),
    *,
    objective: str = "latency",
    logged: Container[str] = (),
) -> str:
    """Return the JSON of the view of one sweep's runs, or of all runs, in `_sweep_order`.

    `title` and `created_ms` (since 1970) appear in MLflow's list of views. `swept` are the keys
    with several values in the sweep, whose columns come first, `objective` is that of all its
    runs, and `logged` the metrics of one of them.
    """
    metric, least_first = _sweep_order(swept, objective, logged)
    columns = _columns(swept, metric)
    state = {
        "searchFilter": sweep_filter(parent_run_id, sweep_id),
        "orderByKey": f"metrics.`{metric}`",
        "orderByAsc": least_first,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": list(columns),
        "columnOrder": [*_FIXED_WIDTHS, *columns],
        "columnWidths": {**_FIXED_WIDTHS, **columns},
        "compareRunSections": [
            _section(_COSTS, "Costs", columns=2),
            _section(_CHOICES, "Choices", columns=1),
        ],
        "compareRunCharts": _cost_charts(metric) + _choice_charts(),
        # Our charts come before those that MLflow adds for other metrics.
        "isAccordionReordered": True,
    }
    view = {
        "name": title,
        "createdAt": created_ms,
        "updatedAt": created_ms,
        "state": json.dumps(state, separators=(",", ":")),
    }
    return json.dumps(view, separators=(",", ":"), ensure_ascii=False)


def _section(uuid: str, name: str, columns: int) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "name": name,
        "display": True,
        "columns": columns,
        "cardHeight": 360,
        "isReordered": False,
        "deleted": False,
        "isGenerated": False,
    }


def _cost_charts(metric: str) -> list[dict[str, Any]]:
    """Return the charts of costs; `metric` is the one that runs are ordered by."""
    return [
        _chart(_COSTS, "BAR", "latency", metricKey=metric),
        _chart(_COSTS, "BAR", "memory", metricKey="peak_memory_gib"),
        _chart(
            _COSTS,
            "SCATTER",
            "trade",
            xaxis={"key": "peak_memory_gib", "type": "METRIC"},
            yaxis={"key": metric, "type": "METRIC"},
        ),
        _chart(_COSTS, "BAR", "partitions", metricKey="partitions"),
    ]


def _choice_charts() -> list[dict[str, Any]]:
    """Return the table of differences: parallel coordinates of twenty runs would be unreadable."""
    return [
        _chart(
            _CHOICES,
            "DIFFERENCE",
            "difference",
            chartName="Differences",
            compareGroups=["Model metrics", "Parameters"],
            showChangeFromBaseline=True,
            showDifferencesOnly=True,
            baselineColumnUuid="",
        ),
    ]


def _chart(section: str, kind: str, uuid: str, **settings: object) -> dict[str, Any]:
    return {
        "uuid": f"fxpart-{uuid}",
        "type": kind,
        "metricSectionId": section,
        "runsCountToCompare": _MOST_RUNS,
        "deleted": False,
        "isGenerated": False,
        **settings,
    }


def _page_fragment(experiment_id: str, parent_run_id: str | None, *, charts: bool = False) -> str:
    """Return the part of the URL after the server's address.

    Without ``workflowType`` MLflow opens a page on language models instead of runs.
    """
    mode = "&compareRunsMode=CHART" if charts else ""
    return (
        f"/#/experiments/{experiment_id}/runs?viewStateShareKey={_view_key(parent_run_id)}"
        f"&workflowType=machine_learning{mode}"
    )


# The page: the view in the store, its address, and the command that serves it.

_UI = "http://127.0.0.1:5000"


def page_of(uri: str, experiment_id: str, parent_run_id: str | None) -> ComparisonPage:
    """Return the address of the page of one sweep, or of all runs, without using the store."""
    server, command = without_password(uri), None
    if not uri.startswith("http"):
        server, command = _UI, _ui_command(uri)
    table, charts = (
        server + _page_fragment(experiment_id, parent_run_id, charts=charts)
        for charts in (False, True)
    )
    return ComparisonPage(table, charts, command)


def write_view(client: "MlflowClient", experiment_id: str, parent_run_id: str | None) -> None:
    """Write the view of one sweep, or of all runs, unless it exists already."""
    if parent_run_id:
        parent = client.get_run(parent_run_id)
        parent_tags: dict[str, str] = parent.data.tags
        title, sweep_id = parent.info.run_name or parent_run_id, parent_tags.get("sweep_id")
        swept, objective = swept_keys(parent_tags), shared_objective(parent_tags)
        of_sweep = sweep_filter(parent_run_id, sweep_id)
        finished = client.search_runs([experiment_id], f"{of_sweep} AND {_FINISHED}", max_results=1)
        logged = finished[0].data.metrics if finished else ()
        order = _sweep_order(swept, objective, logged)
        _color_runs(client, experiment_id, of_sweep, order)
        view = comparison_view(
            parent_run_id,
            title,
            parent.info.start_time,
            sweep_id,
            swept,
            objective=objective,
            logged=logged,
        )
    else:
        view = comparison_view(None, "All runs", 0)
    key = VIEW_TAG + _view_key(parent_run_id)
    tags: dict[str, Any] = client.get_experiment(experiment_id).tags
    if tags.get(key) != view:
        client.set_experiment_tag(experiment_id, key, view)


def _color_runs(
    client: "MlflowClient", experiment_id: str, of_sweep: str, order: tuple[str, bool]
) -> None:
    """Give the first runs of a sweep distinct colours; a run with a colour keeps it."""
    metric, least_first = order
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
    """Return the command that serves the store, with the `mlflow` of this Python."""
    beside = Path(sys.executable).with_name("mlflow")
    on_path = shutil.which("mlflow")
    program = "mlflow"
    if not (on_path and Path(on_path) == beside) and beside.exists():
        working_dir = Path.cwd()
        program = (
            str(beside.relative_to(working_dir))
            if beside.is_relative_to(working_dir)
            else str(beside)
        )
    database = sqlite_path(uri)
    if database is not None and database.is_relative_to(Path.cwd()):
        uri = f"sqlite:///{database.relative_to(Path.cwd())}"
    store = shlex.quote(password_to_fill_in(uri))
    # One worker is enough for one user; MLflow's default of four needs four times the memory, and
    # starts more slowly.
    return f"{shlex.quote(program)} ui --workers 1 --backend-store-uri {store}"
