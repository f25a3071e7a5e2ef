"""The MLflow store: where it is, opening it, and refusing one that does not work."""

import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fxpart.errors import CacheError
from runner.config.passwords import hide_password, without_password
from runner.config.sections import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_schema import make_file, make_schema

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from sqlalchemy import Engine

__all__ = [
    "StoreError",
    "is_database",
    "open_store",
    "reach",
    "refusals",
    "sqlite_path",
    "store_uri",
]

_CONNECT_S = 5.0
_HTTP = ("http", "https")
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_ELSEWHERE = "choose another store with tracking.uri= or keep nothing with tracking=none"
_SWITCHES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow would retry for minutes; what it cannot say in 30 s it does not say in 240.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class StoreError(TrackingError):
    """A store that failed: `what` it was, apart from the advice that the message ends in."""

    def __init__(self, what: str, advice: str = _ELSEWHERE, *, is_gone: bool = True) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.is_gone = is_gone
        """Whether the next request would fail as well, and not just this one was refused."""


def store_uri(config: TrackingConfig, root: Path) -> str:
    """Return the tracking URI that `config` means, a sqlite path in it made absolute.

    Raises `TrackingError` for what MLflow 3 no longer keeps runs in: a folder.
    """
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return _sqlite_uri(root.resolve() / "outputs" / "mlflow.db")
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file") and uri != "databricks":
        raise TrackingError(
            f"tracking uri {uri!r} is a folder, MLflow keeps runs in a database or a server;"
            f" write tracking.uri=sqlite:///{root / 'outputs' / 'mlflow.db'} or http://host:port"
        )
    if scheme in ("postgres", "postgresql"):  # with the driver that the extra installs
        return f"postgresql+psycopg2{uri.removeprefix(scheme)}"
    if scheme != "sqlite":
        return uri.rstrip("/")
    name = uri.removeprefix("sqlite:///")
    if name == uri or name in ("", ":memory:"):
        raise TrackingError(
            f"tracking uri {uri!r} names no file that would keep the runs; write"
            " tracking.uri=sqlite:///path/to/file.db"
        )
    return _sqlite_uri((root / name).resolve())


def _sqlite_uri(database: Path) -> str:
    if set("%?") & set(str(database)):
        raise TrackingError(
            f"tracking in {database}: a database's path must be without % and ?, which mean"
            f" something in a URI; {_ELSEWHERE}"
        )
    return f"sqlite:///{database}"


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of `uri`, or None when it is not sqlite."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


@contextmanager
def refusals(uri: str) -> Iterator[None]:
    """Turn what a failing store raises inside into a `TrackingError` of one line."""
    try:
        yield
    except _failures() as error:
        what = f"tracking at {without_password(uri)} failed: {hide_password(_cause(error), uri)}"
        raise StoreError(what, is_gone=not _is_refusal(error)) from error


def _failures() -> tuple[type[Exception], ...]:
    # Both come with MLflow, and whoever gets here has imported it.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError, sqlite3.Error, ImportError, CacheError)


def _is_refusal(error: BaseException) -> bool:
    """Return whether the store is well, and would not take what it was asked."""
    from mlflow.exceptions import MlflowException

    # Of HTTP: 400 to 499, which are about the request.
    if not isinstance(error, MlflowException):
        return False
    status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
    return 400 <= status < 500


def _cause(error: BaseException) -> str:
    """Return the part of a message that a person needs: connection errors nest it deep."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"^\([\w.]+\) ", "", lines[0]) if lines else type(error).__name__
    innermost = re.findall(r"\[Errno -?\d+\] ([^'\")\]:]+)", text)
    if innermost:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"{innermost[-1].strip()}{named}"
    if "mlflow db upgrade" in text:
        text = text.split("Take a backup")[0].rstrip(" .") + ", mend it with `mlflow db upgrade`"
    return text if len(text) <= 300 else text[:299] + "…"


def reach(uri: str) -> None:
    """Make MLflow ready for `uri`; nothing is opened and nothing made.

    Raises `TrackingError` where no server answers, or a driver is missing.
    """
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
    _knock(uri)
    if is_database(uri):
        _check_driver(uri)
    # Both say in tracebacks and progress notes what a TrackingError says in one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def open_store(config: TrackingConfig, root: Path) -> "tuple[MlflowClient, str, str]":
    """Return a client, the store's URI and the id of the experiment; makes what is missing.

    Safe for any number of processes at once. Raises `TrackingError` within about ten seconds when
    the store is damaged, cannot be written, or does not answer.
    """
    uri = store_uri(config, root)
    reach(uri)
    from mlflow import MlflowClient  # takes 1 to 2 s

    database = sqlite_path(uri)
    artifacts = None
    with refusals(uri):
        if database is not None:
            artifacts = (database.parent / "mlartifacts").as_uri()
            make_file(database, artifacts)
        elif is_database(uri):
            artifacts = (root.resolve() / "outputs" / "mlartifacts").as_uri()
            if uri.startswith("postgresql"):
                make_schema(uri, artifacts)
        _part_with_forks()
        client = MlflowClient(tracking_uri=uri)
        return client, uri, _experiment_id(client, config.experiment, artifacts)


@cache
def _part_with_forks() -> None:
    """Let a process that is forked from this one open connections of its own."""
    os.register_at_fork(after_in_child=_forget_connections)


def _forget_connections() -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    engines: dict[str, Engine] = getattr(SqlAlchemyStore, "_engine_map", {})
    for engine in engines.values():
        engine.dispose(close=False)  # they are the other's to close


def is_database(uri: str) -> bool:
    """Return whether `uri` is a database that MLflow opens itself; a server has one of its own."""
    return urlsplit(uri).scheme.split("+")[0] in ("sqlite", *_DATABASE_PORTS)


def _check_driver(uri: str) -> None:
    from sqlalchemy import make_url

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        raise StoreError(
            f"tracking.uri={without_password(uri)} needs {error.name}",
            "pip install -c constraints.txt '.[postgres]'"
            if uri.startswith("postgresql")
            else f"pip install {error.name}",
        ) from error


def _knock(uri: str) -> None:
    """Refuse at once a server that does not answer."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    try:
        if scheme in _HTTP:
            _ask(uri)
        elif scheme in _DATABASE_PORTS and parts.hostname:
            address = (parts.hostname, parts.port or _DATABASE_PORTS[scheme])
            socket.create_connection(address, timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = hide_password(_cause(error), uri)
        raise StoreError(
            f"tracking at {without_password(uri)} does not answer: {why}",
            "start the server, or correct tracking.uri=, or keep nothing with tracking=none",
        ) from error


def _ask(uri: str) -> None:
    """Raise when nothing answers; any answer is one, a refusal too: MLflow can say what of."""
    import requests  # MLflow's own client, so that proxies apply alike

    try:
        requests.get(f"{uri}/health", timeout=_CONNECT_S, stream=True).close()
    except requests.exceptions.SSLError:
        return


def _experiment_id(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    """Return the id of the experiment, made if missing; another may make it meanwhile."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"experiment {name!r} is deleted; bring it back with `mlflow experiments restore"
            f" --experiment-id {found.experiment_id}` or choose another: tracking.experiment="
        )
    return str(found.experiment_id)
