"""The comparison page: MLflow opens its runs with our columns, order and charts.

MLflow's own first page shows neither a parameter nor a metric. Its "share view" button keeps a
view as JSON in a tag of the experiment, ``mlflow.sharedViewState.<key>``, and a URL that names the
key opens it; we write that tag ourselves. It is no documented interface: whoever calls this must
not fail for it.
"""

import json
from typing import Any

__all__ = ["CHART_METRICS", "VIEW_TAG", "comparison_view", "page_fragment", "view_key"]

VIEW_TAG = "mlflow.sharedViewState."

COLUMNS = (
    "params.`mode`",
    "params.`devices`",
    "params.`transfer_rate`",
    "params.`model`",
    "metrics.`latency_ms`",
    "metrics.`peak_memory_gib`",
    "metrics.`partitions`",
    "metrics.`devices_used`",
    "metrics.`transfer_gib`",
    "metrics.`throughput_per_s`",
    "metrics.`optimality_gap_pct`",
    "metrics.`feasible`",
    "tags.`error`",
)
CHART_METRICS = ("latency_ms", "peak_memory_gib")
_CHOICES = ("model", "mode", "devices", "transfer_rate")
_SECTION = "fxpart-compare"
_MOST_RUNS = 20


def view_key(parent_run_id: str | None) -> str:
    """Return the name of the view of one sweep, or of the whole experiment."""
    return f"fxpart-{parent_run_id}" if parent_run_id else "fxpart-all"


def comparison_view(parent_run_id: str | None, title: str, created_ms: int) -> str:
    """Return the JSON of the view: one sweep's runs, or all that are not sweeps, by latency."""
    if parent_run_id:
        search = f"tags.`mlflow.parentRunId` = '{parent_run_id}'"
    else:
        search = "tags.`kind` = 'run'"
    state = {
        "searchFilter": search,
        "orderByKey": "metrics.`latency_ms`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "SHOWALL",
        "selectedColumns": list(COLUMNS),
        "compareRunSections": [
            {
                "uuid": _SECTION,
                "name": "Compare",
                "display": True,
                "columns": 2,
                "cardHeight": 360,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
            }
        ],
        "compareRunCharts": _charts(),
        # Charts that MLflow adds for other metrics come after ours.
        "isAccordionReordered": True,
    }
    view = {
        "name": title,
        "createdAt": created_ms,
        "updatedAt": created_ms,
        "state": json.dumps(state, separators=(",", ":")),
    }
    return json.dumps(view, separators=(",", ":"), ensure_ascii=False)


def _charts() -> list[dict[str, Any]]:
    latency, memory = CHART_METRICS
    return [
        _chart("latency", "BAR", "Latency (ms)", metricKey=latency),
        _chart("memory", "BAR", "Largest peak memory of a device (GiB)", metricKey=memory),
        _chart(
            "trade",
            "SCATTER",
            "Latency against peak memory",
            xaxis={"key": memory, "type": "METRIC"},
            yaxis={"key": latency, "type": "METRIC"},
        ),
        _chart(
            "timeline",
            "LINE",
            "Memory held, by operator (GiB)",
            metricKey="memory_gib",
            selectedMetricKeys=["memory_gib"],
            xAxisKey="step",
            useGlobalXaxisKey=False,
            lineSmoothness=0,
            useGlobalLineSmoothing=False,
        ),
        _chart(
            "choices",
            "PARALLEL",
            "Choices and what they cost",
            selectedParams=list(_CHOICES),
            selectedMetrics=[*CHART_METRICS, "partitions"],
            showAllRuns=False,
        ),
        _chart(
            "difference",
            "DIFFERENCE",
            "Differences",
            chartName="Differences",
            compareGroups=["Model metrics", "Parameters"],
            showChangeFromBaseline=True,
            showDifferencesOnly=True,
            baselineColumnUuid="",
        ),
    ]


def _chart(uuid: str, kind: str, title: str, **settings: object) -> dict[str, Any]:
    return {
        "uuid": f"fxpart-{uuid}",
        "type": kind,
        "displayName": title,
        "metricSectionId": _SECTION,
        "runsCountToCompare": _MOST_RUNS,
        "deleted": False,
        "isGenerated": False,
        **settings,
    }


def page_fragment(experiment_id: str, parent_run_id: str | None, *, charts: bool = False) -> str:
    """Return the part of the URL after the server's address.

    Without ``workflowType`` MLflow opens a page about language models instead of runs.
    """
    mode = "&compareRunsMode=CHART" if charts else ""
    return (
        f"/#/experiments/{experiment_id}/runs?viewStateShareKey={view_key(parent_run_id)}"
        f"&workflowType=machine_learning{mode}"
    )
