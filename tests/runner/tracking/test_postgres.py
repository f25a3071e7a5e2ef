"""Runs in a real PostgreSQL."""

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from mlflow import MlflowClient
from sqlalchemy import NullPool, create_engine, text

from benchmarks.postgres import PASSWORD, new_database
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_opening import make_schema
from runner.tracking.mlflow_runs import FoundRun, find_run
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.unsent import read_unsent, send_unsent
from tests.runner.postgres import postgres_server

__all__ = ["postgres_server"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.usefixtures("new_forkserver"),
]


def _log_one(uri: str, root: Path, number: int, barrier: Barrier) -> None:
    barrier.wait(120)
    with open_tracker(TrackingConfig(uri=uri), root).start(str(number), {"n": number}) as run:
        run.log(metrics={"n": number}, series={"s": [(step, step / 3) for step in range(100)]})


def _log_at_once(uri: str, root: Path, processes: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.store.tracking.sqlalchemy_store", "psycopg2", __name__])
    barrier = context.Barrier(processes)
    started = [
        context.Process(target=_log_one, args=(uri, root, number, barrier))
        for number in range(processes)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        assert [process.exitcode for process in started] == [0] * processes
    finally:
        for process in started:
            process.kill()


def test_runs_are_stored_in_a_database_created_by_several_processes_at_once(
    postgres_server: str, tmp_path: Path
) -> None:
    uri = new_database(postgres_server, "runs")
    _log_at_once(uri, tmp_path, 3)
    # As people write it: without a driver.
    plain = uri.replace("postgresql+psycopg2", "postgresql")
    tracker = MlflowTracker(TrackingConfig(uri=plain), tmp_path)
    runs = {run.name: run for run in tracker.runs({"kind": "run"})}
    assert sorted(runs) == ["0", "1", "2"]
    client = MlflowClient(uri)
    for number in range(3):
        run = runs[str(number)]
        assert (run.params, run.metrics) == ({"n": str(number)}, {"n": number, "s": 99 / 3})
        history = client.get_metric_history(run.run_id, "s")
        assert [(point.step, point.value) for point in history] == [
            (step, step / 3) for step in range(100)
        ]
    _keep_and_send(tracker, client, tmp_path)
    _find(MlflowTracker(TrackingConfig(uri=uri), tmp_path))
    _say_no_password(tracker, tmp_path)
    make_schema(uri)  # which exists


def _keep_and_send(tracker: MlflowTracker, client: MlflowClient, root: Path) -> None:
    """A run that was kept is completed; its record contains no password."""
    job = root / "job"
    job.mkdir()
    (job / "a.txt").write_text("a")
    with tracker.start("sent", {"p": 1}, {"config_key": "k1", "odd": "a\0b"}, folder=job) as run:
        run.log(metrics={"latency_ms": 1.5}, artifacts_dir=job)
        _let_in(tracker.uri, "false")
    _let_in(tracker.uri, "true")
    assert run.problem is not None
    assert "not currently accepting connections; the run is kept in" in run.problem
    assert read_unsent(job / "unsent.json").run_id == run.run_id
    assert PASSWORD.split()[1] not in (job / "unsent.json").read_text()
    assert send_unsent(root, MlflowTracker(TrackingConfig(uri=tracker.uri), root)) == 1
    assert client.get_run(str(run.run_id)).data.metrics == {"latency_ms": 1.5}
    place = root / "outputs" / "mlartifacts"
    assert [path.read_text() for path in place.rglob("a.txt")] == ["a"]


def _let_in(uri: str, allowed: str) -> None:
    """Open the database to connections, or close it and end the existing ones."""
    server, _, name = uri.rpartition("/")
    engine = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}"))
        if allowed == "false":
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
            connection.execute(text(ended), {"name": name})


def _find(tracker: MlflowTracker) -> None:
    settled = tracker.settled("config_key", ["k1", "k2"])
    assert settled.keys() == {"k1"}
    assert tracker.unfinished("config_key", ["k1"]) == []
    run_id = settled["k1"].run_id
    config = TrackingConfig(uri=tracker.uri, experiment="other")
    assert find_run(config, Path.cwd(), run_id[:12]) == FoundRun(run_id, "fxpart")
    tracker.join_sweep([run_id], "a1")
    tracker.join_sweep([run_id], "b2")
    assert [run.run_id for run in tracker.runs_of_sweep("a1")] == [run_id]
    assert tracker.runs_of_sweep("1") == []
    tracker.mark_cut_off(run_id, "the process died")
    assert tracker.settled("config_key", ["k1"]) == {}


def _say_no_password(tracker: MlflowTracker, root: Path) -> None:
    page = tracker.comparison_page()
    assert page is not None
    assert page.command is not None
    assert "postgresql+psycopg2://me:PASSWORD@127.0.0.1" in page.command
    word = PASSWORD.split()[1]
    wrong = {
        tracker.uri.replace(word, f"{word}-not"): 'password authentication failed for user "me"',
        tracker.uri.replace("/runs", "/nobody"): 'database "nobody" does not exist',
    }
    for uri, message in wrong.items():
        with pytest.raises(TrackingError, match=message) as caught:
            MlflowTracker(TrackingConfig(uri=uri), root)
        assert word not in str(caught.value)
        assert "\n" not in str(caught.value)
