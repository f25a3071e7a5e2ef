"""The view of the comparison page. A browser opens it in `test_mlflow_dashboard`."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from fxpart.errors import SpecError
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.mlflow_view import (
    COLOR_TAG,
    VIEW_TAG,
    comparison_view,
    page_of,
    sweep_filter,
)
from runner.tracking.tracker import shared_objective
from tests.runner.tracked import PARAMS, experiment_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


def state_of(parent: str | None, *swept: str) -> dict[str, Any]:
    view = json.loads(comparison_view(parent, "a sweep", 17, "5e", swept))
    assert (view["name"], view["createdAt"]) == ("a sweep", 17)
    state: dict[str, Any] = json.loads(view["state"])
    return state


def test_columns_of_all_runs_come_first() -> None:
    """A metric that no run has gets no column; these are in the first view of every run."""
    columns = state_of("abc")["selectedColumns"]
    assert columns[:5] == [
        "params.`mode`",
        "params.`devices`",
        "metrics.`latency_ms`",
        "metrics.`peak_memory_gib`",
        "metrics.`partitions`",
    ]
    assert len(set(columns)) == len(columns)


def test_a_schedule_and_measurements_have_columns() -> None:
    state = state_of("abc")
    metrics = ("step_ms", "bubble_pct", "measured_ms", "time_error_pct")
    for name in (*metrics, "tokens_per_s", "ttft_ms", "tpot_ms", "max_context"):
        assert f"metrics.`{name}`" in state["selectedColumns"]
    for name in ("schedule", "microbatches", "plan"):
        assert f"params.`{name}`" in state["selectedColumns"]
    assert state["columnOrder"] == list(state["columnWidths"])
    assert state["columnOrder"][2:] == state["selectedColumns"]


def test_a_sweep_shows_its_runs_alone() -> None:
    expected = "tags.`kind` = 'run' AND tags.`sweeps` LIKE '% 5e %'"
    assert state_of("abc")["searchFilter"] == expected
    assert state_of(None)["searchFilter"] == "tags.`kind` = 'run'"
    # A sweep made before runs could belong to several sweeps.
    assert sweep_filter("abc") == "tags.`mlflow.parentRunId` = 'abc'"


def test_swept_settings_come_before_all_others() -> None:
    state = state_of("abc", "devices", "model.batch_size")
    assert state["selectedColumns"][:4] == [
        "params.`devices`",
        "params.`model.batch_size`",
        "params.`mode`",
        "metrics.`latency_ms`",
    ]
    assert len(set(state["selectedColumns"])) == len(state["selectedColumns"])
    assert state["columnWidths"]["params.`model.batch_size`"] >= 8 * len("model.batch_size")
    # Lines of twenty overlapping runs show nothing.
    kinds = [chart["type"] for chart in state["compareRunCharts"]]
    assert kinds == ["BAR", "BAR", "SCATTER", "BAR", "DIFFERENCE"]
    assert "metrics.`latency_ms`" in state["columnWidths"]


@pytest.mark.parametrize(
    ("swept", "key", "least_first"),
    [
        ((), "latency_ms", True),
        (("mode", "devices"), "latency_ms", True),
        (("mode", "model.batch_size"), "examples_per_s", False),
        (("microbatches",), "examples_per_s", False),
    ],
)
def test_the_order_is_that_of_the_ranking(
    swept: tuple[str, ...], key: str, least_first: bool
) -> None:
    state = state_of("abc", *swept)
    assert (state["orderByKey"], state["orderByAsc"]) == (f"metrics.`{key}`", least_first)
    assert f"metrics.`{key}`" in state["selectedColumns"]


@pytest.mark.parametrize(
    ("given", "swept", "key"),
    [
        ("throughput", "mode", "load_ms"),
        ("throughput", "model.batch_size", "examples_per_s"),
        ("memory", "model.batch_size", "peak_memory_gib"),
        ("energy", "mode", "energy_j"),
        ("latency,energy", "objective", "latency_ms"),
    ],
)
def test_runs_with_one_objective_are_in_its_order(given: str, swept: str, key: str) -> None:
    objective = shared_objective({"overrides": json.dumps([f"objective={given}"])})
    view = json.loads(comparison_view("abc", "a sweep", 17, "5e", (swept,), objective=objective))
    state = json.loads(view["state"])
    assert state["orderByKey"] == f"metrics.`{key}`"
    assert state["selectedColumns"].count(f"metrics.`{key}`") == 1
    assert state["columnOrder"][2:] == state["selectedColumns"]
    assert shared_objective({}) == "latency"


@pytest.mark.parametrize(
    ("logged", "swept", "key"),
    [
        ({"tpot_ms"}, "mode", "latency_ms"),
        ({"tpot_ms"}, "model.batch_size", "tokens_per_s"),
        ({"tpot_ms", "ttft_ms"}, "output_len", "tokens_per_s"),
        ({"tpot_ms", "ttft_ms"}, "mode", "tokens_per_s"),
        ({"ttft_ms"}, "model.batch_size", "examples_per_s"),
        ({"step_ms"}, "mode", "examples_per_s"),
    ],
)
def test_decodes_and_steps_of_schedules_are_in_order_of_their_rate(
    tracker: MlflowTracker, client: MlflowClient, logged: set[str], swept: str, key: str
) -> None:
    parent = tracker.start_sweep("sweep", {"swept": json.dumps([swept])})
    with tracker.start("child", PARAMS, parent_run_id=parent) as run:
        run.log(metrics=dict.fromkeys({*logged, "latency_ms"}, 1.0))
    with pytest.raises(SpecError), tracker.start("later", PARAMS, parent_run_id=parent):
        raise SpecError("does not fit")
    tracker.comparison_page(parent)
    view = json.loads(experiment_of(client).tags[f"{VIEW_TAG}fxpart-{parent}"])
    state = json.loads(view["state"])
    assert state["orderByKey"] == f"metrics.`{key}`"
    assert state["selectedColumns"].count(f"metrics.`{key}`") == 1


def test_comparison_page_of_a_sweep(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    parent = tracker.start_sweep("sweep · two")
    ids = []
    for latency in (2.0, 1.0):
        with tracker.start("child", PARAMS, parent_run_id=parent) as run:
            run.log(metrics={"latency_ms": latency})
        ids.append(str(run.run_id))
    client.set_tag(ids[1], COLOR_TAG, "#123456")
    page = tracker.comparison_page(parent)
    assert page is not None
    experiment = experiment_of(client)
    assert page.url == (
        f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs"
        f"?viewStateShareKey=fxpart-{parent}&workflowType=machine_learning"
    )
    assert page.charts_url == page.url + "&compareRunsMode=CHART"
    assert page.command is not None
    assert page.command.endswith(
        f"ui --workers 1 --backend-store-uri sqlite:///{tmp_path}/outputs/mlflow.db"
    )
    written = experiment.tags[f"{VIEW_TAG}fxpart-{parent}"]
    assert len(written) < 5000  # the form that older servers take
    view = json.loads(written)
    assert view["name"] == "sweep · two"
    state = json.loads(view["state"])
    assert state["searchFilter"] == f"tags.`mlflow.parentRunId` = '{parent}'"
    shown = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert {run.info.run_id for run in shown} == set(ids)
    colors = [client.get_run(run_id).data.tags[COLOR_TAG] for run_id in ids]
    assert colors[1] == "#123456"
    assert colors[0] != colors[1]


def test_an_address_and_a_command_are_shown_without_a_password() -> None:
    page = page_of("http://me:a/secret@host:5000", "1", None)
    assert page.url.startswith("http://host:5000/#/experiments/1/")
    assert page.command is None
    page = page_of("postgresql://me:a/secret@host/db?sslpassword=secret", "1", None)
    assert page.command is not None
    assert page.command.endswith("'postgresql://me:PASSWORD@host/db?sslpassword=PASSWORD'")


def test_comparison_page_of_all_runs_leaves_sweeps_out(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    parent = tracker.start_sweep("sweep")
    with tracker.start("child", PARAMS, parent_run_id=parent) as child:
        pass
    with tracker.start("alone", PARAMS) as alone:
        pass
    page = tracker.comparison_page()
    assert page is not None
    assert "viewStateShareKey=fxpart-all&" in page.url
    experiment = experiment_of(client)
    state = json.loads(json.loads(experiment.tags[f"{VIEW_TAG}fxpart-all"])["state"])
    shown = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert {run.info.run_id for run in shown} == {child.run_id, alone.run_id}


def test_a_page_that_cannot_be_prepared_still_has_an_address(
    tracker: MlflowTracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "outputs" / "mlflow.db"
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    database.write_bytes(b"broken " * 10_000)
    page = tracker.comparison_page()
    assert page is not None
    assert page.url.startswith("http://127.0.0.1:5000/#/experiments/")
    assert "keeps MLflow's own columns" in capsys.readouterr().err


def test_a_truncated_tag_does_not_lose_the_page(tracker: MlflowTracker) -> None:
    parent = tracker.start_sweep("sweep", {"sweep_id": "a1", "swept": '["mode", "dev'})
    page = tracker.comparison_page(parent)
    assert page is not None
    assert f"viewStateShareKey=fxpart-{parent}" in page.url
