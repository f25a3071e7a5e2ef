"""Making an MLflow database: whole, or not at all, however many processes want it at once.

Six processes that open a missing MLflow database together leave five dead of a half-made schema
(and a process killed meanwhile leaves it half-made for good). So a database file is made under
another name and renamed, by whoever holds a lock beside it; PostgreSQL makes the schema in one
transaction, for whoever holds a lock in it.
"""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.support.whole_file import remove_abandoned, temporary_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["make_file", "make_schema"]

_LOCKED_S = 20.0  # as long as MLflow itself waits for another writer
_LOCK = 0x66787061
"""Of PostgreSQL's advisory locks, the one for making the schema: ``fxpa`` in ASCII."""


def make_file(database: Path, artifacts_uri: str) -> None:
    """Make the sqlite file `database` if it is missing, with its folder.

    Raises sqlite's own error for a file that MLflow would retry for a minute, or spoil.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(database.parent)
    if not _is_there(database):
        with _lock(database):
            if not _is_there(database):
                _make(database, artifacts_uri)
    _check_writable(database)


def _is_there(database: Path) -> bool:
    return database.exists() and database.stat().st_size > 0


@contextmanager
def _lock(database: Path) -> Iterator[None]:
    """Hold the lock beside the database; it falls with the process that holds it."""
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(database: Path, artifacts_uri: str) -> None:
    unfinished = database.with_name(temporary_name())
    try:
        _open_with_mlflow(f"sqlite:///{unfinished}", artifacts_uri)
        with closing(sqlite3.connect(unfinished)) as connection:
            # Halves the time of each write, stays in the file, and readers no longer wait.
            connection.execute("PRAGMA journal_mode=WAL")
        unfinished.replace(database)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            unfinished.with_name(unfinished.name + suffix).unlink(missing_ok=True)


def _open_with_mlflow(uri: str, artifacts_uri: str) -> None:
    """Have MLflow open a database, which makes its tables, and let go of it."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    make_store: Any = SqlAlchemyStore  # untyped in MLflow
    make_store(uri, artifacts_uri).engine.dispose()


def _check_writable(database: Path) -> None:
    with closing(sqlite3.connect(database, timeout=_LOCKED_S, isolation_level=None)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            raise sqlite3.DatabaseError("the file is a database of something else, not of MLflow")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def make_schema(uri: str, artifacts_uri: str) -> None:
    """Make MLflow's tables in a PostgreSQL database that has none.

    Raises sqlalchemy's errors, at once: MLflow itself would try a wrong password for minutes.
    """
    from sqlalchemy import NullPool, create_engine, text

    # Each statement by itself: an open transaction would hold up those that make tables.
    engine = create_engine(uri, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if _has_schema(connection):
            return
        # The lock falls with the connection, so with a process that is killed.
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK})
        if not _has_schema(connection):
            _open_with_mlflow(uri, artifacts_uri)


def _has_schema(connection: "Connection") -> bool:
    """Return whether the schema is whole: its version is written with it, in one transaction."""
    from sqlalchemy import inspect, text

    if not inspect(connection).has_table("alembic_version"):
        return False
    return connection.execute(text("SELECT 1 FROM alembic_version")).first() is not None
