import logging
import multiprocessing
import os
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import patch

import pytest

from fxpart.errors import FxpartError
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking import mlflow_opening, mlflow_store
from runner.tracking.mlflow_opening import open_store
from runner.tracking.mlflow_store import store_uri
from runner.tracking.open_tracker import open_tracker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment: opening a store sets MLflow's switches in it."""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("MLFLOW")]:
            del os.environ[name]
        yield


def _refused(config: TrackingConfig, root: Path, within_s: float = 30.0) -> str:
    begin = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        open_store(config, root)
    assert time.monotonic() - begin < within_s
    assert isinstance(caught.value, FxpartError)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_default_is_a_file_below_the_root(tmp_path: Path) -> None:
    assert store_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path}/outputs/mlflow.db"


def test_the_environment_takes_precedence_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000/")
    assert store_uri(TrackingConfig(), tmp_path) == "http://there:5000"
    assert store_uri(TrackingConfig(uri="http://here"), tmp_path) == "http://here"


def test_a_relative_sqlite_path_starts_at_the_root(tmp_path: Path) -> None:
    assert store_uri(TrackingConfig(uri="sqlite:///a.db"), tmp_path) == f"sqlite:///{tmp_path}/a.db"
    absolute = "sqlite:////elsewhere/a.db"
    assert store_uri(TrackingConfig(uri=absolute), tmp_path) == absolute


@pytest.mark.parametrize("uri", ["./mlruns", "/x/mlruns", "file:///x/mlruns"])
def test_a_folder_is_refused(uri: str, tmp_path: Path) -> None:
    message = _refused(TrackingConfig(uri=uri), tmp_path)
    assert uri in message
    assert "tracking.uri=sqlite:///" in message


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_database_without_a_file_is_refused(uri: str, tmp_path: Path) -> None:
    assert "names no file" in _refused(TrackingConfig(uri=uri), tmp_path)


def test_a_path_that_a_uri_would_change_is_refused(tmp_path: Path) -> None:
    assert "must not contain % or ?" in _refused(TrackingConfig(), tmp_path / "50%41")
    assert "must not contain % or ?" in _refused(TrackingConfig(uri="sqlite:///a.db?x=1"), tmp_path)


def test_making_a_store_twice_gives_the_same_experiment(tmp_path: Path) -> None:
    root = tmp_path / "with space, # and é"
    config = TrackingConfig(experiment="mine")
    logger = logging.getLogger("somebody.elses")
    client, uri, first = open_store(config, root)
    assert open_store(config, root)[1:] == (uri, first)
    experiment = client.get_experiment(first)
    assert experiment.name == "mine"
    assert experiment.artifact_location == (root / "outputs" / "mlartifacts").as_uri()
    assert not logger.disabled
    kept = {path.name for path in (root / "outputs").iterdir()}
    assert kept - {"mlflow.db-wal", "mlflow.db-shm"} == {"mlflow.db", "mlflow.db.lock"}
    with closing(sqlite3.connect(root / "outputs" / "mlflow.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    _delete_and_refuse(root, first)
    _age_and_refuse(root)


def _delete_and_refuse(root: Path, experiment_id: str) -> None:
    client, _, _ = open_store(TrackingConfig(experiment="mine"), root)
    client.delete_experiment(experiment_id)
    message = _refused(TrackingConfig(experiment="mine"), root)
    assert f"--experiment-id {experiment_id}" in message
    assert "'mine' is deleted" in message


def _age_and_refuse(root: Path) -> None:
    """A database of another MLflow, at a path that this process has not opened."""
    old = root / "old.db"
    with (
        closing(sqlite3.connect(root / "outputs" / "mlflow.db")) as source,
        closing(sqlite3.connect(old)) as target,
    ):
        source.backup(target)
        target.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        target.commit()
    message = _refused(TrackingConfig(uri=f"sqlite:///{old}"), root)
    assert "out-of-date database schema (found version ffffffffffff" in message
    assert "mlflow db upgrade" in message


_LATER = ("second", "third", "fourth")


def _use_with_others(root: Path, barrier: Barrier) -> None:
    barrier.wait(30)
    with open_tracker(TrackingConfig(), root).start("first", {"process": os.getpid()}):
        pass
    for name in _LATER:  # these find an existing store, without an experiment
        barrier.wait(30)
        open_tracker(TrackingConfig(experiment=name), root)


@pytest.mark.usefixtures("new_forkserver")
def test_six_processes_create_and_use_one_store_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["mlflow.store.tracking.sqlalchemy_store", "alembic.command", __name__]
    )
    barrier = context.Barrier(6)
    processes = [
        context.Process(target=_use_with_others, args=(tmp_path, barrier)) for _ in range(6)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
        assert [process.exitcode for process in processes] == [0] * 6
    finally:
        for process in processes:
            process.kill()
    with closing(sqlite3.connect(tmp_path / "outputs" / "mlflow.db")) as connection:
        names = connection.execute("SELECT name FROM experiments ORDER BY name").fetchall()
        (kept,) = connection.execute("SELECT count(DISTINCT value) FROM params").fetchone()
    assert names == sorted((name,) for name in ("Default", "fxpart", *_LATER))
    assert kept == 6


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_postgresql_is_reached_by_the_driver_of_the_extra(scheme: str, tmp_path: Path) -> None:
    config = TrackingConfig(uri=f"{scheme}://me:word@host/runs")
    assert store_uri(config, tmp_path) == "postgresql+psycopg2://me:word@host/runs"


def test_a_missing_driver_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)  # as if it were not installed
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}/runs"
        message = _refused(TrackingConfig(uri=f"postgresql://me:secret@{place}"), tmp_path)
    assert message == (
        f"tracking.uri=postgresql+psycopg2://{place} needs psycopg2; pip install 'fxpart[postgres]'"
    )


def test_garbage_is_refused(tmp_path: Path) -> None:
    database = tmp_path / "runs.db"
    database.write_bytes(b"not a database" * 1000)
    message = _refused(TrackingConfig(uri="sqlite:///runs.db"), tmp_path)
    assert "file is not a database, move it away to have a new one created" in message
    assert f"sqlite:///{database}" in message
    assert "tracking=none" in message
    assert database.read_bytes() == b"not a database" * 1000


def test_a_foreign_database_is_refused_and_unchanged(tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    before = database.read_bytes()
    assert "not an MLflow database" in _refused(TrackingConfig(uri="sqlite:///shop.db"), tmp_path)
    assert database.read_bytes() == before


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runs.db")
    message = _refused(TrackingConfig(uri="sqlite:///runs.db"), tmp_path)
    assert f"a device, a pipe or a socket ({tmp_path / 'runs.db'})" in message


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where the folder should be")
    assert f"({tmp_path / 'outputs'})" in _refused(TrackingConfig(), tmp_path)


def test_a_database_that_another_keeps_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_opening, "_LOCKED_S", 0.1)
    with closing(sqlite3.connect(tmp_path / "runs.db")) as other:
        other.execute("CREATE TABLE experiments (name TEXT)")
        other.execute("BEGIN IMMEDIATE")
        assert "locked" in _refused(TrackingConfig(uri="sqlite:///runs.db"), tmp_path)


def test_a_read_only_database_is_refused(tmp_path: Path) -> None:
    database = tmp_path / "runs.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE experiments (name TEXT)")
    database.chmod(0o400)
    if os.access(database, os.W_OK):
        pytest.skip("this user may write anything")
    assert "readonly" in _refused(TrackingConfig(uri="sqlite:///runs.db"), tmp_path)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port without a listener, held so that no other process gets it meanwhile."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize("scheme", ["http", "postgresql+psycopg2"])
def test_a_missing_server_is_refused(scheme: str, tmp_path: Path, closed_port: int) -> None:
    place = f"127.0.0.1:{closed_port}"
    message = _refused(TrackingConfig(uri=f"{scheme}://me:secret@{place}"), tmp_path)
    assert f"{scheme}://{place} does not answer: Connection refused" in message
    assert "secret" not in message
    assert "tracking=none" in message


def test_a_server_that_never_answers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_store, "_CONNECT_S", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert f"{uri} does not answer" in _refused(TrackingConfig(uri=uri), tmp_path)


def test_switches_set_by_the_user_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "6")
    _refused(TrackingConfig(uri=f"http://127.0.0.1:{closed_port}"), tmp_path)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "6"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
