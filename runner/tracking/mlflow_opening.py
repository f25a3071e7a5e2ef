"""Open an MLflow store, creating it atomically if it is missing.

Of six processes that open a missing MLflow database together, five fail on a partial schema, and
one that is killed meanwhile leaves the schema partial for good. So the first opening is guarded: a
database file is created under another name and renamed, under a lock file; PostgreSQL creates its
schema in one transaction, under an advisory lock.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from weakref import WeakSet

from fxpart.support.regular_file import regular_status
from fxpart.support.whole_file import remove_abandoned, temporary_name
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_store import (
    has_content,
    is_database,
    reach,
    refusals,
    sqlite_path,
    store_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from sqlalchemy import Connection, Engine

__all__ = ["Store", "disconnect", "make_file", "make_schema", "open_store"]

_LOCKED_S = 20.0
"""Longest wait for another writer, the same as MLflow sets for SQLite."""
_SCHEMA_LOCK = 0x66787061
"""Key of PostgreSQL's advisory lock for creating the schema: ``fxpa`` in ASCII."""


class Store(NamedTuple):
    """An open store and the experiment for runs."""

    client: "MlflowClient"
    uri: str
    """Tracking URI, with its password."""
    experiment_id: str

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which no other process of ours writes a run to the same file."""
        database = sqlite_path(self.uri)
        return nullcontext() if database is None else _turn(database)


@contextmanager
def _turn(database: Path) -> Iterator[None]:
    """Wait for this process's turn to write, at most as long as SQLite would.

    SQLite's writers retry after growing pauses: of sixteen at once, some wait until they fail.
    After a timeout here, SQLite decides.
    """
    with database.with_name(f"{database.name}.turn").open("wb") as file:  # closing it unlocks it
        # flock has no timeout, but a waiting thread can be abandoned.
        locking = Thread(target=_lock, args=(file,), daemon=True)
        locking.start()
        locking.join(_LOCKED_S)
        yield


def _lock(file: BinaryIO) -> None:
    with suppress(OSError):  # a file system without locks, or the file has been closed
        fcntl.flock(file, fcntl.LOCK_EX)


def open_store(config: TrackingConfig, root: Path) -> Store:
    """Open the store and its experiment, creating either if it is missing.

    Safe for any number of processes at once. Raises `TrackingError` within about ten seconds if the
    store is damaged, not writable, or does not answer, or the experiment is deleted.
    """
    uri = store_uri(config, root)
    reach(uri)
    from mlflow import MlflowClient  # takes 1 to 2 s

    database = sqlite_path(uri)
    artifacts = None
    _watch_engines()
    with refusals(uri):
        if database is not None:
            artifacts = (database.parent / "mlartifacts").as_uri()
            make_file(database)
            disconnect(database)  # the file may have been replaced since MLflow opened it
        elif is_database(uri):
            artifacts = (root.resolve() / "outputs" / "mlartifacts").as_uri()
            if uri.startswith("postgresql"):
                make_schema(uri)
        client = MlflowClient(tracking_uri=uri)
        return Store(client, uri, _experiment_id(client, config.experiment, artifacts))


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    """Return the id of the experiment, created if missing by whichever process is first."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"experiment {name!r} is deleted; restore it with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}` or choose another: tracking.experiment="
        )
    return str(experiment.experiment_id)


# The first opening of a database.


def make_file(database: Path) -> None:
    """Create the SQLite file `database` and its folder if missing.

    Raises SQLite's error for a file that MLflow would retry for a minute, or spoil, and `OSError`
    if the path is not a regular file, such as a pipe.
    """
    if database.exists():
        regular_status(database)
    database.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(database.parent)
    if not has_content(database):
        with database.with_name(f"{database.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends
            if not has_content(database):
                _make_file(database)
    _check_writable(database)


def _make_file(database: Path) -> None:
    from mlflow import MlflowClient

    _watch_engines()
    unfinished = database.with_name(temporary_name())
    try:
        MlflowClient(tracking_uri=f"sqlite:///{unfinished}")  # creates the tables
        disconnect(unfinished)
        with closing(sqlite3.connect(unfinished)) as connection:
            # Persistent in the file: halves the time of each write, and readers do not wait.
            connection.execute("PRAGMA journal_mode=WAL")
        unfinished.replace(database)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            unfinished.with_name(unfinished.name + suffix).unlink(missing_ok=True)


def _check_writable(database: Path) -> None:
    with closing(sqlite3.connect(database, timeout=_LOCKED_S, isolation_level=None)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            raise sqlite3.DatabaseError("the file is not an MLflow database")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def make_schema(uri: str) -> None:
    """Create MLflow's tables in a PostgreSQL database without any.

    Raises SQLAlchemy's errors at once; MLflow would retry a wrong password for minutes.
    """
    from mlflow import MlflowClient
    from sqlalchemy import NullPool, create_engine, text

    # Autocommit: an open transaction would block those that create tables.
    engine = create_engine(uri, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if _has_schema(connection):
            return
        # The lock is released with the connection, even if the process is killed.
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _SCHEMA_LOCK})
        if not _has_schema(connection):
            MlflowClient(tracking_uri=uri)


def _has_schema(connection: "Connection") -> bool:
    """Return whether the schema is complete: this table is created last, in one transaction."""
    from sqlalchemy import inspect

    return inspect(connection).has_table("alembic_version")


# MLflow keeps database connections open for the life of a process. They must be dropped when the
# process forks, and when the file is replaced.

_engines: "WeakSet[Engine]" = WeakSet()
"""SQLAlchemy engines that have connected in this process, including MLflow's."""


@cache
def _watch_engines() -> None:
    from sqlalchemy import Engine, event

    event.listen(Engine, "engine_connect", lambda opened: _engines.add(opened.engine))
    os.register_at_fork(after_in_child=_forget_connections)


def _forget_connections() -> None:
    for engine in list(_engines):
        engine.dispose(close=False)  # the parent process closes them


def disconnect(database: Path) -> None:
    """Close this process's connections to an SQLite file, so that nothing is left beside it."""
    for engine in list(_engines):
        if engine.url.database == str(database):
            engine.dispose()
