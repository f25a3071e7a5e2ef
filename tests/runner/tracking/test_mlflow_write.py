"""A run that is written in SQL is the run that MLflow's own client would write."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from runner.config.sections import TrackingConfig
from runner.tracking.mlflow_database import Database
from runner.tracking.mlflow_runs import MlflowRuns
from runner.tracking.mlflow_write import Store, fill_and_close, find_or_make, make_run
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import UnsentRun

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture(scope="module")
def stores(
    empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Store]]:
    """One store, written in both ways."""
    root = tmp_path_factory.mktemp("write")
    (root / "outputs").mkdir()
    shutil.copy(empty_store, root / "outputs")
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        open_tracker(TrackingConfig(), root)
        uri = f"sqlite:///{root / 'outputs' / 'mlflow.db'}"
        client, database = MlflowClient(uri), Database(uri)
        experiment = client.get_experiment_by_name("fxpart")
        assert experiment is not None
        known, place = experiment.experiment_id, experiment.artifact_location
        runs = MlflowRuns(client, known, None)
        yield {
            "sql": Store(client, known, place, database, runs),
            "client": Store(client, known, place, None, runs),
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a job."""
    for name in ("result.json", "config/resolved.yaml", "stages/stage_0.pt2", "unsent.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def _record(record_id: str) -> UnsentRun:
    return UnsentRun(
        record_id=record_id,
        name="kl_based · 4x16gb",
        uri="",
        experiment="fxpart",
        status="FINISHED",
        start_ms=1_700_000_000_123,
        end_ms=1_700_000_002_456,
        params={"mode": "kl_based", "empty": ""},
        tags={
            "outcome": "finished",
            "kind": "run",
            "record_id": record_id,
            "mlflow.user": "somebody",
            "long": "x" * 9000,
            "odd": "a\0b\udc80",
        },
        metrics={"latency_ms": 0.1 + 0.2, "feasible": 1.0, "tiny": 5e-324, "whole": 3},
        series={"memory_gib": [(3, 1.0), (5, 2.5), (9, 0.5)], "peak·gib": [(0, 7.0)]},
        tables={"devices": {"device": [0, 1], "name": ["a", "b"], "load": [0.5, float("inf")]}},
        artifacts=".",
        left_out="stages",
    )


def _described(store: Store, run_id: str) -> dict[str, Any]:
    """Return what MLflow says of a run, apart from its id and where its files are."""
    client = store.client
    run = client.get_run(run_id)
    files = client.list_artifacts(run_id)
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time),
        "user": run.info.user_id,
        "stage": run.info.lifecycle_stage,
        "params": run.data.params,
        "metrics": run.data.metrics,
        "tags": {key: value for key, value in run.data.tags.items() if key != "record_id"},
        "history": {
            name: [(p.step, p.value, p.timestamp) for p in client.get_metric_history(run_id, name)]
            for name in run.data.metrics
        },
        "files": sorted(item.path for item in files),
        "inside": [item.path for item in client.list_artifacts(run_id, "config")],
        "folder": run.info.artifact_uri.replace(run_id, "ID"),
    }


def _written(store: Store, folder: Path, record_id: str) -> str:
    run = _record(record_id)
    made = make_run(store, run.name, {**run.tags, "outcome": ""}, run.start_ms, run.params)
    fill_and_close(store, made, replace(run, params={}), folder)
    return made.run_id


def test_both_ways_write_the_same(stores: dict[str, Store], folder: Path) -> None:
    by_sql = _described(stores["sql"], _written(stores["sql"], folder, "a"))
    assert by_sql == _described(stores["client"], _written(stores["client"], folder, "b"))
    assert by_sql["times"] == (1_700_000_000_123, 1_700_000_002_456)
    assert by_sql["metrics"]["latency_ms"] == 0.1 + 0.2
    assert by_sql["history"]["memory_gib"] == [
        (3, 1.0, 1_700_000_002_456),
        (5, 2.5, 1_700_000_002_456),
        (9, 0.5, 1_700_000_002_456),
    ]
    assert by_sql["metrics"]["memory_gib"] == 0.5
    assert by_sql["files"] == ["config", "devices.json", "result.json"]
    assert by_sql["inside"] == ["config/resolved.yaml"]
    assert by_sql["tags"]["odd"] == "a?b?"


def test_mlflow_loads_a_table_from_the_runs_that_have_it(
    stores: dict[str, Store], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores["sql"]
    run_id = _written(store, folder, "t")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.client.tracking_uri)  # what it asks there
    frame = store.client.load_table(store.experiment_id, "devices.json", [run_id], ["run_id"])
    assert list(frame["name"]) == ["a", "b"]
    assert list(frame["load"].isna()) == [False, True]
    assert set(frame["run_id"]) == {run_id}


@pytest.mark.parametrize("way", ["sql", "client"])
def test_a_run_that_is_sent_again_is_there_once(
    way: str, stores: dict[str, Store], folder: Path
) -> None:
    store, run = stores[way], _record(f"again-{way}")
    first = find_or_make(store, run)  # and the process dies
    assert "outcome" not in store.client.get_run(first.run_id).data.tags
    for _ in range(2):
        made = find_or_make(store, run)
        assert made.run_id == first.run_id
        fill_and_close(store, made, run, folder)
    assert len(store.client.get_metric_history(first.run_id, "memory_gib")) == 3
    described = _described(store, first.run_id)
    assert described["params"] == run.params
    assert described["tags"]["outcome"] == "finished"


def test_a_run_that_fails_to_be_written_is_not_there_in_part(
    stores: dict[str, Store], folder: Path
) -> None:
    store = stores["sql"]
    run = _record("part")
    made = find_or_make(store, run)
    with (
        patch("runner.tracking.mlflow_database._latest", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        fill_and_close(store, made, run, folder)
    kept = store.client.get_run(made.run_id)
    assert (kept.info.status, kept.data.metrics, kept.data.params) == ("RUNNING", {}, {})
