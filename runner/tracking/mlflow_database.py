"""An MLflow store that is a database, asked in SQL: a run is written whole, or not at all.

MLflow's own client sends each value through the object mapper, several transactions a run: some 50
ms. Here a run is made in one transaction and filled in another. The tables are MLflow's own, as
its models declare them; what is written is what its client would write, and a test compares.
"""

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing import BinaryIO

    from sqlalchemy import Connection, Engine

__all__ = ["Database", "NewRun", "Point", "Values", "chunks", "open_database"]

Point = tuple[str, float, int, int]
"""Of a metric: its name, the value, the time in milliseconds since 1970, and the step."""
_VALUES = 500
"""As many as one statement carries: databases limit it."""
_NAME = "mlflow.runName"
_LOCKED_MS = 20_000  # as long as MLflow itself waits for another writer


class NewRun(NamedTuple):
    """A run to be made; names and lengths are legal."""

    run_id: str
    name: str
    experiment_id: str
    artifact_uri: str
    start_ms: int
    tags: Mapping[str, str]
    params: Mapping[str, str]


class Values(NamedTuple):
    """What a run is filled with; names and lengths are legal."""

    params: Mapping[str, str]
    points: Sequence[Point]
    tags: Mapping[str, str]


class Database:
    """Connections to one database, of this process. Methods raise sqlalchemy's errors."""

    def __init__(self, uri: str) -> None:
        """Connect when the first question comes."""
        self._uri, self._process = uri, 0
        self._made: Engine | None = None
        self._file = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:") else None

    @contextmanager
    def _transaction(self) -> "Iterator[Connection]":
        if self._made is None or self._process != os.getpid():
            # Connections of the process that this one was forked from are not ours to close.
            self._made, self._process = _engine(self._uri), os.getpid()
        with self._made.begin() as connection:
            yield connection

    @contextmanager
    def _write(self) -> "Iterator[Connection]":
        with _turn(self._file), self._transaction() as connection:
            yield connection

    def make_run(self, run: NewRun) -> None:
        """Add a run that is under way."""
        row = {
            "run_uuid": run.run_id,
            "name": run.name,
            "experiment_id": int(run.experiment_id),
            "artifact_uri": run.artifact_uri,
            "user_id": run.tags.get("mlflow.user", "unknown"),
            "status": "RUNNING",
            "start_time": run.start_ms,
            # What MLflow's client leaves to tags.
            "source_type": "UNKNOWN",
            "source_name": "",
            "entry_point_name": "",
            "source_version": "",
            "lifecycle_stage": "active",
        }
        with self._write() as connection:
            connection.execute(_tables()["runs"].insert(), [row])
            _put(connection, "tags", _texts(run.run_id, {**run.tags, _NAME: run.name}))
            _put(connection, "params", _texts(run.run_id, run.params))

    def close_run(self, run_id: str, status: str, end_ms: int, values: Values) -> None:
        """Add `values` to a run and end it, in one transaction; again, it changes nothing."""
        runs = _tables()["runs"]
        with self._write() as connection:
            # First a write: a transaction that reads first may find that another has written since.
            ended = runs.update().where(runs.c.run_uuid == run_id)
            connection.execute(ended.values(status=status, end_time=end_ms))
            _put(connection, "params", _texts(run_id, values.params))
            _put(connection, "metrics", _numbers(run_id, values.points))
            _put(connection, "latest_metrics", _numbers(run_id, _latest(values.points)))
            _put(connection, "tags", _texts(run_id, values.tags))

    def set_tags(self, tags: Mapping[str, Mapping[str, str]]) -> None:
        """Set tags of many runs, by run id, in one transaction."""
        with self._write() as connection:
            rows = [row for run_id, texts in tags.items() for row in _texts(run_id, texts)]
            _put(connection, "tags", rows)

    def add_word(self, run_ids: Collection[str], tag: str, word: str, most_chars: int) -> None:
        """Add `word` to a tag of words, with a space on both sides of each, where it is missing.

        Each tag is changed by one statement, so that of two who add both are kept. A tag of
        `most_chars` takes no more.
        """
        tags = _tables()["tags"]
        with self._write() as connection:
            for some in chunks(run_ids, _VALUES):
                mine = tags.c.run_uuid.in_(some) & (tags.c.key == tag)
                lacks = tags.c.value.not_like(f"% {word} %") & (_length(tags.c.value) < most_chars)
                added = tags.update().where(mine & lacks).values(value=tags.c.value + f"{word} ")
                connection.execute(added)
                fresh = [row for run_id in some for row in _texts(run_id, {tag: f" {word} "})]
                connection.execute(_insert_new(connection.dialect.name, "tags"), fresh)

    def ids(
        self, experiment_id: str, equal: Mapping[str, Collection[str]], like: Mapping[str, str]
    ) -> list[str]:
        """Return the ids of active runs by their tags, the oldest first.

        Each tag of `equal` has one of the values, each of `like` matches the pattern.
        """
        from sqlalchemy import select

        runs, found = _tables()["runs"], []
        many = max(equal, key=lambda tag: len(equal[tag]), default=None)
        with self._transaction() as connection:
            for some in chunks(equal[many], _VALUES) if many else [()]:
                query = select(runs.c.start_time, runs.c.run_uuid).where(
                    runs.c.experiment_id == int(experiment_id), runs.c.lifecycle_stage == "active"
                )
                for tag, values in {**equal, **({many: some} if many else {})}.items():
                    query = _where_tag(query, tag, lambda value, v=values: value.in_(list(v)))
                for tag, pattern in like.items():
                    query = _where_tag(query, tag, lambda value, p=pattern: value.like(p))
                found += [tuple(row) for row in connection.execute(query)]
        return [str(run_id) for _, run_id in sorted(found)]

    def rows(self, name: str, run_ids: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of these runs in one of MLflow's tables."""
        from sqlalchemy import select

        table = _tables()[name]
        with self._transaction() as connection:
            for some in chunks(run_ids, _VALUES):
                yield from connection.execute(select(table).where(table.c.run_uuid.in_(some)))


def open_database(uri: str) -> Database | None:
    """Return the database of a store, None where it is another kind or a server."""
    return Database(uri) if uri.startswith(("sqlite:", "postgresql")) else None


def chunks(values: Collection[str], most: int) -> Iterator[list[str]]:
    """Yield `values` in pieces of at most `most`, each value once."""
    rest = iter(dict.fromkeys(values))
    while piece := list(islice(rest, most)):
        yield piece


@contextmanager
def _turn(database: Path | None) -> Iterator[None]:
    """Hold the right to write to a file, of all processes that do so here.

    Without it sqlite would have each writer try again after a pause that grows: of sixteen at once
    some wait for seconds. It is not waited for longer than sqlite would: it then decides alone.
    """
    if database is None:
        yield
        return
    with database.with_name(f"{database.name}.turn").open("wb") as file:
        # Beside this thread, as such a wait has no deadline; the lock falls with the file.
        waiting = Thread(target=_lock, args=(file,), daemon=True)
        waiting.start()
        waiting.join(_LOCKED_MS / 1000)
        yield


def _lock(file: "BinaryIO") -> None:
    with suppress(OSError):  # of a file system without such locks, or a file closed meanwhile
        fcntl.flock(file, fcntl.LOCK_EX)


def _engine(uri: str) -> "Engine":
    from sqlalchemy import create_engine, event

    # Else psycopg2 asks the server once for each row.
    together = {"executemany_mode": "values_plus_batch"} if "+psycopg2" in uri else {}
    engine = create_engine(uri, pool_pre_ping=True, **together)
    if uri.startswith("sqlite:"):
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:  # noqa: ANN401 (of any driver)
    connection.execute(f"PRAGMA busy_timeout = {_LOCKED_MS}")
    connection.execute("PRAGMA foreign_keys = ON")
    # As PostgreSQL's LIKE, and MLflow's.
    connection.execute("PRAGMA case_sensitive_like = ON")
    # With a write-ahead log the file stays sound; a power cut may cost the last runs, no kill does.
    connection.execute("PRAGMA synchronous = NORMAL")


def _tables() -> Mapping[str, Any]:
    from mlflow.store.tracking.dbmodels.models import SqlRun

    tables: Mapping[str, Any] = SqlRun.metadata.tables
    return tables


def _put(connection: "Connection", name: str, rows: list[dict[str, Any]]) -> None:
    """Insert rows into a table; one that is there already gets the value."""
    if rows:
        connection.execute(_insert(connection.dialect.name, name), rows)


def _length(column: Any) -> Any:  # noqa: ANN401 (sqlalchemy's own)
    from sqlalchemy import func

    return func.length(column)


@cache
def _insert_new(dialect: str, name: str) -> Any:  # noqa: ANN401 (sqlalchemy's own)
    """Return the statement that leaves alone what is there already."""
    from sqlalchemy.dialects import postgresql, sqlite

    kinds: dict[str, Any] = {"sqlite": sqlite, "postgresql": postgresql}
    return kinds[dialect].insert(_tables()[name]).on_conflict_do_nothing()


@cache
def _insert(dialect: str, name: str) -> Any:  # noqa: ANN401 (sqlalchemy's own)
    from sqlalchemy.dialects import postgresql, sqlite

    kinds: dict[str, Any] = {"sqlite": sqlite, "postgresql": postgresql}
    table = _tables()[name]
    statement = kinds[dialect].insert(table)
    identity = [column.name for column in table.primary_key.columns]
    if "value" in identity:  # a point is all that there is of it
        return statement.on_conflict_do_nothing(index_elements=identity)
    replaced = {
        column.name: statement.excluded[column.name]
        for column in table.columns
        if column.name not in identity
    }
    return statement.on_conflict_do_update(index_elements=identity, set_=replaced)


def _where_tag(query: Any, tag: str, holds: Any) -> Any:  # noqa: ANN401 (sqlalchemy's own)
    runs, tags = _tables()["runs"], _tables()["tags"].alias()
    same = (tags.c.run_uuid == runs.c.run_uuid) & (tags.c.key == tag)
    return query.join(tags, same & holds(tags.c.value))


def _texts(run_id: str, texts: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"run_uuid": run_id, "key": key, "value": value} for key, value in texts.items()]


def _numbers(run_id: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    return [
        {
            "run_uuid": run_id,
            "key": name,
            "value": value,
            "timestamp": time_ms,
            "step": step,
            "is_nan": False,
        }
        for name, value, time_ms, step in points
    ]


def _latest(points: Sequence[Point]) -> list[Point]:
    """Return of each metric the point of the last step."""
    latest: dict[str, Point] = {}
    for point in points:
        name, value, time_ms, step = point
        known = latest.get(name)
        if known is None or (step, time_ms, value) > (known[3], known[2], known[1]):
            latest[name] = point
    return list(latest.values())
