"""The address of an MLflow store, and quick checks that it can work."""

import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from fxpart.errors import CacheError
from runner.config.passwords import hide_password, without_password
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError

__all__ = [
    "StoreError",
    "has_content",
    "is_database",
    "reach",
    "refusals",
    "sqlite_path",
    "store_uri",
]

_CONNECT_S = 5.0
_HTTP = ("http", "https")
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_NOT_A_CAUSE = "(raised as a result of Query-invoked autoflush"
"""The line with which SQLAlchemy starts some errors."""
_ELSEWHERE = "choose another store with tracking.uri= or log nothing with tracking=none"
_SWITCHES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow would retry for minutes; a server that is silent for 30 s is gone.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class StoreError(TrackingError):
    """A store that failed. `what` is the message without the advice at its end."""

    def __init__(self, what: str, advice: str = _ELSEWHERE, *, is_gone: bool = True) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what
        self.is_gone = is_gone
        """Whether further requests would fail too; False if only this one was rejected."""
        self._advice = advice

    def __reduce__(self) -> tuple[partial["StoreError"], tuple[str, str]]:
        return partial(StoreError, is_gone=self.is_gone), (self.what, self._advice)


def store_uri(config: TrackingConfig, root: Path) -> str:
    """Return the tracking URI of `config`, with an absolute path if it is SQLite.

    Raises `TrackingError` for a folder, which MLflow 3 no longer supports, and for an SQLite URI
    without a usable file name.
    """
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return _sqlite_uri(root.resolve() / "outputs" / "mlflow.db")
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file") and uri != "databricks":
        raise TrackingError(
            f"tracking uri {uri!r} is a folder, but MLflow keeps runs in a database or on a "
            f"server; write tracking.uri=sqlite:///{root / 'outputs' / 'mlflow.db'} or "
            "http://host:port"
        )
    if scheme in ("postgres", "postgresql"):  # with the driver installed by the extra
        return f"postgresql+psycopg2{uri.removeprefix(scheme)}"
    if scheme != "sqlite":
        return uri.rstrip("/")
    name = uri.removeprefix("sqlite:///")
    if name == uri or name in ("", ":memory:"):
        raise TrackingError(
            f"tracking uri {uri!r} names no file to keep the runs in; write "
            "tracking.uri=sqlite:///path/to/file.db"
        )
    return _sqlite_uri((root / name).resolve())


def _sqlite_uri(database: Path) -> str:
    if set("%?") & set(str(database)):
        raise TrackingError(
            f"tracking in {database}: a database's path must not contain % or ?, which have a "
            f"meaning in a URI; {_ELSEWHERE}"
        )
    return f"sqlite:///{database}"


def has_content(database: Path) -> bool:
    """Return whether an SQLite file exists and is not empty, as after only opening it."""
    return database.is_file() and database.stat().st_size > 0


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of `uri`; None if it is not SQLite."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


@contextmanager
def refusals(uri: str) -> Iterator[None]:
    """Turn all exceptions of a failing store in the block into a `StoreError` of one line."""
    try:
        yield
    except _failures() as error:
        problem = f"tracking at {without_password(uri)} failed: {hide_password(_cause(error), uri)}"
        raise StoreError(problem, is_gone=not _is_refusal(error)) from error


def _failures() -> tuple[type[Exception], ...]:
    # MLflow, which also installs SQLAlchemy, is already imported.
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError, sqlite3.Error, ImportError, CacheError)


def _is_refusal(error: BaseException) -> bool:
    """Return whether the store works and rejected the request: HTTP status 400 to 499."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return False
    status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
    return 400 <= status < 500


_DAMAGED = ("file is not a database", "disk image is malformed")
"""SQLite's messages about a file that it cannot read."""


def _cause(error: BaseException) -> str:
    """Return the informative part of a message, which connection errors nest deeply."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines[1:] if lines and lines[0].startswith(_NOT_A_CAUSE) else lines
    text = re.sub(r"^\([\w.]+\) ", "", lines[0]) if lines else type(error).__name__
    innermost = re.findall(
        r"(?:\[Errno -?\d+\] |Error\(\d+, '|RemoteDisconnected\(')([^'\")\]:]+)", text
    )
    if innermost:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"{innermost[-1].strip()}{named}"
    if "mlflow db upgrade" in text:
        text = text.split("Take a backup")[0].rstrip(" .") + ", upgrade it with `mlflow db upgrade`"
    if any(damage in text for damage in _DAMAGED):
        text += ", move it away to have a new one created"
    return text if len(text) <= 300 else text[:299] + "…"


def reach(uri: str) -> None:
    """Prepare MLflow for `uri`, without opening or creating anything.

    Raises `TrackingError` if no server answers, or a driver is missing.
    """
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
    _knock(uri)
    if is_database(uri):
        _check_driver(uri)
    # They log tracebacks and progress notes, for which a TrackingError has one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def is_database(uri: str) -> bool:
    """Return whether `uri` is a database that MLflow opens itself, rather than a server."""
    return urlsplit(uri).scheme.split("+")[0] in ("sqlite", *_DATABASE_PORTS)


def _check_driver(uri: str) -> None:
    from sqlalchemy import make_url

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        raise StoreError(
            f"tracking.uri={without_password(uri)} needs {error.name}",
            "pip install 'fxpart[postgres]'"
            if uri.startswith("postgresql")
            else f"pip install {error.name}",
        ) from error


def _knock(uri: str) -> None:
    """Raise `StoreError` if a server does not answer."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    try:
        if scheme in _HTTP:
            _ask(uri)
        elif scheme in _DATABASE_PORTS and parts.hostname:
            address = (parts.hostname, parts.port or _DATABASE_PORTS[scheme])
            socket.create_connection(address, timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        cause = hide_password(_cause(error), uri)
        raise StoreError(
            f"tracking at {without_password(uri)} does not answer: {cause}",
            "start the server, or correct tracking.uri=, or log nothing with tracking=none",
        ) from error


def _ask(uri: str) -> None:
    """Raise if nothing answers. Error pages count as answers: MLflow reports them later."""
    import requests  # as MLflow does, so that the same proxies apply

    try:
        requests.get(f"{uri}/health", timeout=_CONNECT_S, stream=True).close()
    except requests.exceptions.SSLError:
        return
