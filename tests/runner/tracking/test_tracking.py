import json
import math
import multiprocessing
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fxpart.errors import InfeasibleError, SpecError
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import Runs, Tracker
from tests.runner.tracked import PARAMS, experiment_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


def test_importing_it_does_not_import_mlflow() -> None:
    modules = "runner.tracking.tracker, runner.job.record"
    code = f"import sys, {modules}; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="tracking=mlfow does not exist; nearest: mlflow"):
        open_tracker(TrackingConfig(name="mlfow"), tmp_path)


def test_no_tracking_stores_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(TrackingConfig(name="none"), tmp_path)
    parent = tracker.start_sweep("sweep")
    with tracker.start("run", PARAMS, parent_run_id=parent) as run:
        run.log(metrics={"latency_ms": 1.0})
    tracker.finish_sweep(parent)
    assert (run.run_id, parent, tracker.comparison_page(parent)) == (None, None, None)
    assert tracker.runs({"kind": "run"}) == tracker.runs_of_sweep("a") == []
    assert tracker.settled("config_key", ["a"]) == {}
    assert tracker.unfinished("config_key", ["a"]) == []
    with pytest.raises(SpecError, match="no run 'a': tracking=none keeps none"):
        tracker.run("a")
    assert list(tmp_path.iterdir()) == []
    assert type(tracker) is Tracker


def test_the_tracker_of_mlflow_inherits_nothing_from_no_tracking() -> None:
    kept = {**vars(Runs), **vars(Tracker)}
    public = [name for name in kept if not name.startswith("_")]
    assert len(public) > 15
    assert [name for name in public if getattr(MlflowTracker, name) is kept[name]] == []


def test_a_run_is_read_back_as_logged(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    (tmp_path / "art" / "graph").mkdir(parents=True)
    (tmp_path / "art" / "graph" / "a.svg").write_text("<svg/>")
    with tracker.start("kl_based · 4x16gb", PARAMS, {"config_key": "k1"}) as run:
        assert run.run_id is not None
        assert client.get_run(run.run_id).info.status == "RUNNING"
        assert client.get_run(run.run_id).data.params == PARAMS
        run.log(
            metrics={"latency_ms": 12.5, "feasible": 1},
            series={"memory_gib": [(3, 1.0), (5, 2.5), (9, 0.5)]},
            tables={"devices": {"device": [0, 1], "name": ["a", "b"]}},
            artifacts_dir=tmp_path / "art",
            tags={"verdict": "fits"},
        )
    kept = client.get_run(run.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.info.run_name == "kl_based · 4x16gb"
    assert kept.data.params == PARAMS
    assert kept.data.metrics == {"latency_ms": 12.5, "feasible": 1.0, "memory_gib": 0.5}
    history = client.get_metric_history(run.run_id, "memory_gib")
    assert [(point.step, point.value) for point in history] == [(3, 1.0), (5, 2.5), (9, 0.5)]
    tags = kept.data.tags
    assert (tags["kind"], tags["config_key"], tags["verdict"]) == ("run", "k1", "fits")
    assert {item.path for item in client.list_artifacts(run.run_id)} == {"devices.json", "graph"}
    table = Path(client.download_artifacts(run.run_id, "devices.json")).read_text()
    assert json.loads(table) == {"columns": ["device", "name"], "data": [[0, "a"], [1, "b"]]}


def test_an_excluded_folder_stays_in_place(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    for name in ("graph/a.svg", "stages/stage_0.pt2", "result.json"):
        (tmp_path / "art" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "art" / name).write_text("x")
    with tracker.start("with stages", PARAMS) as run:
        run.log(artifacts_dir=tmp_path / "art", left_out="stages")
    assert run.run_id is not None
    assert {item.path for item in client.list_artifacts(run.run_id)} == {"graph", "result.json"}
    assert [item.path for item in client.list_artifacts(run.run_id, "graph")] == ["graph/a.svg"]


def test_a_run_larger_than_one_request(tracker: MlflowTracker, client: MlflowClient) -> None:
    params = {f"p{index}": index for index in range(150)}
    metrics = {f"m{index}": float(index) for index in range(1000)}
    with tracker.start("big", params) as run:
        run.log(metrics=metrics, series={"s": [(step, float(step)) for step in range(2700)]})
    assert run.run_id is not None
    kept = client.get_run(run.run_id)
    assert kept.data.params == {name: str(value) for name, value in params.items()}
    assert kept.data.metrics == {**metrics, "s": 2699.0}
    assert len(client.get_metric_history(run.run_id, "s")) == 100


def test_infinite_numbers_and_odd_names_do_no_harm(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    odd = {"a+b=c": 1, "x//y": "", "n" * 400: 2, "kl·based": None, "..": 3}
    with tracker.start("", odd, {"t@g": "y"}) as run:
        run.log(metrics={"inf": math.inf, "nan": math.nan, "m%": 1.0}, tags={"long": "z" * 9000})
    assert run.run_id is not None
    data = client.get_run(run.run_id).data
    assert data.metrics == {"m_": 1.0}
    assert data.params == {"a_b_c": "1", "x/y": "", "n" * 250: "2", "kl_based": "null", "_": "3"}
    assert data.tags["t_g"] == "y"
    assert len(data.tags["long"]) == 8000


def test_an_infeasible_run_is_marked_as_such(tracker: MlflowTracker, client: MlflowClient) -> None:
    reason = "gpt2 needs 20 GiB, 1x16gb has 14.9 GiB"
    with pytest.raises(InfeasibleError), tracker.start("bad", PARAMS) as run:
        raise InfeasibleError(reason)
    assert run.run_id is not None
    kept = client.get_run(run.run_id)
    assert kept.info.status == "FAILED"
    assert kept.info.end_time is not None
    assert kept.data.metrics == {"feasible": 0.0}
    assert kept.data.tags["error"] == reason
    assert kept.data.params == PARAMS


def test_a_failure_after_the_result_keeps_the_result(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    def log_then_fail() -> None:
        with tracker.start("bug", PARAMS) as run:
            run.log(metrics={"feasible": 1, "latency_ms": 2.0})
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        log_then_fail()
    (kept,) = client.search_runs([experiment_of(client).experiment_id])
    assert kept.info.status == "FAILED"
    assert kept.data.metrics == {"feasible": 1.0, "latency_ms": 2.0}
    assert kept.data.tags["error"] == "ZeroDivisionError: division by zero"


def test_an_interrupted_run_does_not_stay_running(
    tracker: MlflowTracker, client: MlflowClient
) -> None:
    with pytest.raises(KeyboardInterrupt), tracker.start("stopped", PARAMS) as run:
        raise KeyboardInterrupt
    assert run.run_id is not None
    kept = client.get_run(run.run_id)
    assert kept.info.status == "KILLED"
    assert kept.data.tags["error"] == "cut off: it was interrupted"
    assert kept.data.metrics == {}


def test_a_store_that_breaks_during_a_run_hides_no_error(
    tracker: MlflowTracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_then_fail() -> None:
        with tracker.start("run", PARAMS):
            _break(tmp_path / "outputs" / "mlflow.db")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_then_fail()
    assert "could not be marked as failed" in capsys.readouterr().err
    with pytest.raises(TrackingError, match=r"failed: .*tracking=none"):
        tracker.start_sweep("sweep")


def _break(database: Path) -> None:
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    database.write_bytes(b"broken " * 10_000)


def test_children_name_their_parent(tracker: MlflowTracker, client: MlflowClient) -> None:
    parent = tracker.start_sweep("sweep mode (2)", {"overrides": "mode=a,b"})
    with tracker.start("child", PARAMS, parent_run_id=parent) as run:
        pass
    assert client.get_run(parent).info.status == "RUNNING"
    tracker.finish_sweep(parent, "FAILED")
    assert run.run_id is not None
    assert client.get_run(run.run_id).data.tags["mlflow.parentRunId"] == parent
    kept = client.get_run(parent)
    assert kept.info.status == "FAILED"
    assert kept.data.tags["kind"] == "sweep"


def test_a_process_opens_a_store_once(tracker: MlflowTracker, tmp_path: Path) -> None:
    assert open_tracker(TrackingConfig(), tmp_path) is tracker
    assert open_tracker(TrackingConfig(experiment="else"), tmp_path) is not tracker


def test_a_replaced_file_is_another_store(
    tracker: MlflowTracker, empty_store: Path, tmp_path: Path
) -> None:
    with tracker.start("before", PARAMS):
        pass
    database = tmp_path / "outputs" / "mlflow.db"
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    shutil.copy(empty_store, tmp_path / "copy.db")
    (tmp_path / "copy.db").replace(database)
    other = open_tracker(TrackingConfig(), tmp_path)
    assert other is not tracker
    with other.start("after", PARAMS):
        pass
    assert [run.name for run in other.runs({"kind": "run"})] == ["after"]
    with closing(sqlite3.connect(database)) as connection:
        names = connection.execute("SELECT name FROM runs").fetchall()
    assert names == [("after",)]


def _log_in_a_fork(root: Path) -> None:
    with open_tracker(TrackingConfig(), root).start("fork", PARAMS):
        pass


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(
    tracker: MlflowTracker, client: MlflowClient, tmp_path: Path
) -> None:
    with tracker.start("before", PARAMS):
        child = multiprocessing.get_context("fork").Process(target=_log_in_a_fork, args=[tmp_path])
        child.start()
        child.join(60)
        assert child.exitcode == 0
    runs = client.search_runs([experiment_of(client).experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["before", "fork"]
    assert {run.info.status for run in runs} == {"FINISHED"}
