"""What the comparison page is told to show. A browser looks at it in `test_mlflow_dashboard`."""

import json
from typing import Any

import pytest

from runner.tracking.mlflow_view import comparison_view, sweep_filter


def state_of(parent: str | None, *swept: str) -> dict[str, Any]:
    view = json.loads(comparison_view(parent, "a sweep", 17, "5e", swept))
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
    expected = "tags.`kind` = 'run' AND tags.`sweeps` LIKE '% 5e %'"
    assert state_of("abc")["searchFilter"] == expected
    assert state_of(None)["searchFilter"] == "tags.`kind` = 'run'"
    # One that was made before runs could belong to several sweeps.
    assert sweep_filter("abc") == "tags.`mlflow.parentRunId` = 'abc'"


def test_what_is_swept_comes_before_all_else() -> None:
    state = state_of("abc", "devices", "model.batch_size")
    assert state["selectedColumns"][:4] == [
        "params.`devices`",
        "params.`model.batch_size`",
        "metrics.`examples_per_s`",
        "params.`mode`",
    ]
    assert len(set(state["selectedColumns"])) == len(state["selectedColumns"])
    assert state["columnWidths"]["params.`model.batch_size`"] >= 8 * len("model.batch_size")
    (choices,) = (c for c in state["compareRunCharts"] if c["type"] == "PARALLEL")
    assert choices["selectedParams"] == ["devices", "model.batch_size"]
    assert "metrics.`latency_ms`" in state["columnWidths"]


@pytest.mark.parametrize(
    ("swept", "key", "least_first"),
    [
        ((), "latency_ms", True),
        (("mode", "devices"), "latency_ms", True),
        (("mode", "model.batch_size"), "examples_per_s", False),
        (("microbatches",), "microbatches_per_s", False),
    ],
)
def test_the_order_is_that_of_our_ranking(
    swept: tuple[str, ...], key: str, least_first: bool
) -> None:
    state = state_of("abc", *swept)
    assert (state["orderByKey"], state["orderByAsc"]) == (f"metrics.`{key}`", least_first)
    assert f"metrics.`{key}`" in state["selectedColumns"]
