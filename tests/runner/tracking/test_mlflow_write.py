"""One run in MLflow: what is written, and that a kill at any moment doubles or loses nothing."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_opening import Store, open_store
from runner.tracking.mlflow_write import fill_and_close, find_or_make, keep_artifacts, make_run
from runner.tracking.tracker import UnsentRun
from runner.tracking.unsent import UNSENT_FILE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture(scope="module")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("write")
    (root / "outputs").mkdir()
    shutil.copy(empty_store, root / "outputs")
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        yield open_store(TrackingConfig(), root)


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
    """Return a run as stored by MLflow, apart from its id and the place of its files."""
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
    run_id = make_run(store, run.name, {**run.tags, "outcome": ""}, run.start_ms, run.params)
    fill_and_close(store, run_id, replace(run, params={}), folder)
    return run_id


def test_all_of_a_run_is_written(store: Store, folder: Path) -> None:
    written = _described(store, _written(store, folder, "a"))
    experiment = store.client.get_experiment(store.experiment_id)
    tags = written.pop("tags")
    assert written == {
        "name": "kl_based · 4x16gb",
        "status": "FINISHED",
        "times": (1_700_000_000_123, 1_700_000_002_456),
        "user": "somebody",
        "stage": "active",
        "params": {"mode": "kl_based", "empty": ""},
        "metrics": {
            "latency_ms": 0.1 + 0.2,
            "feasible": 1.0,
            "tiny": 5e-324,
            "whole": 3.0,
            "memory_gib": 0.5,
            "peak_gib": 7.0,
        },
        "history": {
            "latency_ms": [(0, 0.1 + 0.2, 1_700_000_002_456)],
            "feasible": [(0, 1.0, 1_700_000_002_456)],
            "tiny": [(0, 5e-324, 1_700_000_002_456)],
            "whole": [(0, 3.0, 1_700_000_002_456)],
            "memory_gib": [
                (3, 1.0, 1_700_000_002_456),
                (5, 2.5, 1_700_000_002_456),
                (9, 0.5, 1_700_000_002_456),
            ],
            "peak_gib": [(0, 7.0, 1_700_000_002_456)],
        },
        "files": ["config", "devices.json", "result.json"],
        "inside": ["config/resolved.yaml"],
        "folder": f"{experiment.artifact_location}/ID/artifacts",
    }
    assert tags.keys() == {
        *("outcome", "kind", "long", "odd"),
        *("mlflow.user", "mlflow.runName", "mlflow.loggedArtifacts"),
    }
    assert (tags["outcome"], tags["odd"], len(tags["long"])) == ("finished", "a?b?", 8000)


def test_mlflow_loads_a_table_from_the_runs_that_have_it(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = _written(store, folder, "t")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)  # the query it makes there
    frame = store.client.load_table(store.experiment_id, "devices.json", [run_id], ["run_id"])
    assert list(frame["name"]) == ["a", "b"]
    assert list(frame["load"].isna()) == [False, True]
    assert set(frame["run_id"]) == {run_id}


def test_a_run_sent_again_is_stored_once(store: Store, folder: Path) -> None:
    run = _record("again")
    first = find_or_make(store, run)  # and the process dies
    assert "outcome" not in store.client.get_run(first).data.tags
    for _ in range(2):
        run_id = find_or_make(store, run)
        assert run_id == first
        fill_and_close(store, run_id, run, folder)
    assert len(store.client.get_metric_history(first, "memory_gib")) == 3
    described = _described(store, first)
    assert described["params"] == run.params
    assert described["tags"]["outcome"] == "finished"


_WRITES = ("create_run", "log_batch", "log_artifact", "log_artifacts", "log_text", "set_terminated")


def _killed_at(number: int, *, after: bool) -> Callable[[Any], Any]:
    """Return a wrapper under which the process dies at one of the client's writes."""
    count = 0

    def wrap(write: Any) -> Any:  # noqa: ANN401 (a method of MLflow's)
        def dying(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            nonlocal count
            count += 1
            dies = count == number
            if dies and not after:
                raise KeyboardInterrupt
            done = write(*arguments, **options)
            if dies:
                raise KeyboardInterrupt
            return done

        return dying

    return wrap


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_sender_killed_at_any_write_leaves_one_complete_run(
    number: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """The writes: the run, a folder, a file, a table that is a file too, all values, the end."""
    run = _record(f"killed-{number}-{after}")
    with monkeypatch.context() as patched:
        wrap = _killed_at(number, after=after)
        for name in _WRITES:
            patched.setattr(MlflowClient, name, wrap(getattr(MlflowClient, name)))
        with pytest.raises(KeyboardInterrupt):
            fill_and_close(store, find_or_make(store, run), run, folder)
    tagged = f"tags.record_id = '{run.record_id}'"
    for half in store.client.search_runs([store.experiment_id], tagged):
        # A reader that has the outcome has everything.
        assert "outcome" not in half.data.tags or len(half.data.metrics) == 6
        assert half.info.status == "RUNNING" or "outcome" in half.data.tags
    fill_and_close(store, find_or_make(store, run), run, folder)
    (kept,) = store.client.search_runs([store.experiment_id], tagged)
    whole = _described(store, _written(store, folder, f"whole-{number}-{after}"))
    assert _described(store, kept.info.run_id) == whole


def test_values_for_launchers_alone_are_left_out(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "config").mkdir(parents=True)
    (folder / "stages").mkdir()
    for name in ("result.json", "job.json", UNSENT_FILE, "config/job.json"):
        (folder / name).touch()
    run_id = make_run(store, "files", {}, 0)
    keep_artifacts(store.client, run_id, {}, folder, "stages")
    paths = [item.path for at in ("", "config") for item in store.client.list_artifacts(run_id, at)]
    assert paths == ["config", "result.json", "config/job.json"]
    for name in ("job.json", UNSENT_FILE):
        (folder / name).unlink()
    (folder / "stages").rmdir()
    (folder / "table.csv").touch()
    keep_artifacts(store.client, run_id, {}, folder, "stages")
    paths = [item.path for at in ("", "config") for item in store.client.list_artifacts(run_id, at)]
    assert paths == ["config", "result.json", "table.csv", "config/job.json"]
