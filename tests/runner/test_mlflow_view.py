"""What the comparison page is told to show. A browser looks at it in `test_mlflow_dashboard`."""

import json
from typing import Any

from runner.mlflow_view import comparison_view


def state_of(parent: str | None) -> dict[str, Any]:
    view = json.loads(comparison_view(parent, "a sweep", 17))
    assert (view["name"], view["createdAt"]) == ("a sweep", 17)
    state: dict[str, Any] = json.loads(view["state"])
    return state


def test_what_is_always_there_comes_first() -> None:
    """A metric that no run has gets no column; these are in every run's first look."""
    columns = state_of("abc")["selectedColumns"]
    assert columns[:5] == [
        "params.`mode`",
        "params.`devices`",
        "metrics.`latency_ms`",
        "metrics.`peak_memory_gib`",
        "metrics.`partitions`",
    ]
    assert len(set(columns)) == len(columns)


def test_a_schedule_and_what_was_measured_have_columns() -> None:
    state = state_of("abc")
    for name in ("step_ms", "bubble_pct", "measured_ms", "time_error_pct"):
        assert f"metrics.`{name}`" in state["selectedColumns"]
    for name in ("schedule", "microbatches"):
        assert f"params.`{name}`" in state["selectedColumns"]
    assert state["columnOrder"] == state["selectedColumns"] == list(state["columnWidths"])


def test_a_sweep_shows_its_runs_alone() -> None:
    assert state_of("abc")["searchFilter"] == "tags.`mlflow.parentRunId` = 'abc'"
    assert state_of(None)["searchFilter"] == "tags.`kind` = 'run'"
