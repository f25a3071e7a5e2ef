"""Runs before they are in the store: collected while open, and written to disk if the store fails.

In that case the run stays in its job's folder until the store is back. The file is written
atomically, and removed once its run is in the store. The store identifies each run by its record,
so that a run sent twice is stored once.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from fxpart.errors import FxpartError, InfeasibleError, NotApplicableError, SpecError
from fxpart.support.json_file import read_document
from fxpart.support.text_files import write_json
from runner.config.passwords import without_password
from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_store import store_uri
from runner.tracking.mlflow_values import finite_metrics, param_texts, thin
from runner.tracking.tracker import Columns, RunLog, RunStatus, Series, Tracker, UnsentRun

__all__ = [
    "OUTCOME",
    "RECORD",
    "UNSENT_FILE",
    "OpenRun",
    "now_ms",
    "read_unsent",
    "send_command",
    "send_file",
    "send_unsent",
    "unsent_files",
    "write_unsent",
]

OUTCOME, RECORD = "outcome", "record_id"
"""Tags: how a run ended, logged last; and the id of its record."""
_FEASIBLE = "feasible"


class OpenRun(RunLog):
    """Collects the results of one run."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        place: tuple[str, str],
    ) -> None:
        """Start the run now; `place` is a `Tracker.place`."""
        self.name, self.record_id = name, secrets.token_hex(8)
        self.params = param_texts(params)
        self.tags = {**tags, RECORD: self.record_id}
        self.start_ms = now_ms()
        self._artifacts: Path | None = None
        self._uri, self._experiment = place
        self._metrics: dict[str, float] = {}
        self._series: dict[str, Series] = {}
        self._tables: dict[str, Columns] = {}
        self._left_out: str | None = None

    def log(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        series: Mapping[str, Series] | None = None,
        tables: Mapping[str, Columns] | None = None,
        artifacts_dir: Path | None = None,
        left_out: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Collect results; see `RunLog.log`."""
        self._metrics |= metrics or {}
        self._series |= {name: thin(points) for name, points in (series or {}).items()}
        self._tables |= tables or {}
        self.tags |= tags or {}
        if artifacts_dir is not None:
            self._artifacts, self._left_out = artifacts_dir, left_out

    def ended(self, folder: Path, error: BaseException | None = None) -> UnsentRun:
        """End the run now, by `error` if any, and return it ready for logging.

        `folder` is where it is written if the store fails.
        """
        status, outcome = _end_of(error, in_sweep="sweeps" in self.tags)
        metrics, tags = self._metrics, dict(self.tags)
        if error is not None:
            tags["error"] = _error_text(error)
            if outcome == "not_applicable":
                # No metrics: this is neither a result nor a failure.
                tags["mlflow.note.content"] = f"not applicable: {tags['error']}"
            elif outcome != "cut_off":
                metrics = {_FEASIBLE: 0.0, **metrics}
        return UnsentRun(
            record_id=self.record_id,
            name=self.name,
            uri=self._uri,
            experiment=self._experiment,
            status=status,
            start_ms=self.start_ms,
            end_ms=max(now_ms(), self.start_ms),
            run_id=self.run_id,
            params=self.params,
            tags={**tags, OUTCOME: outcome},
            metrics=finite_metrics(metrics),
            series=self._series,
            tables=self._tables,
            artifacts=os.path.relpath(self._artifacts, folder) if self._artifacts else None,
            left_out=self._left_out,
        )


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)


def _end_of(error: BaseException | None, *, in_sweep: bool) -> tuple[RunStatus, str]:
    if error is None:
        return "FINISHED", "finished"
    if in_sweep and isinstance(error, NotApplicableError):
        return "FINISHED", "not_applicable"
    if isinstance(error, InfeasibleError):
        return "FAILED", "infeasible"
    # An interrupt, or the end of the process, is not a result of the job.
    return ("FAILED", "failed") if isinstance(error, Exception) else ("KILLED", "cut_off")


def _error_text(error: BaseException) -> str:
    """Return the message of an error, with the class unless it is one of ours."""
    if isinstance(error, KeyboardInterrupt):  # or SIGTERM, which is raised as one
        return "cut off: it was interrupted"
    message = str(error).strip()
    if isinstance(error, FxpartError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# Unsent runs on disk.


def send_command(uri: str, root: Path, folder: str = "") -> str:
    """Return the command that sends runs to the store `uri`, given without its password."""
    configured = without_password(store_uri(TrackingConfig(), root))
    named = [] if uri == configured else [f"--uri {uri}"]
    return " ".join(["python -m runner.send", *named, *([folder] if folder else [])])


UNSENT_FILE = "unsent.json"
_SCHEMA, _VERSION = "fxpart.unsent", 1
_COPIES = "mlartifacts"
"""The folder with MLflow's copies of jobs' folders."""
_MOST_MS, _MOST_METRIC = 2**62, 1e300
"""Largest values that a store accepts."""


def write_unsent(folder: Path, run: UnsentRun) -> Path:
    """Write `run` to `UNSENT_FILE` in `folder` and return the file.

    Raises `CacheError` if the folder cannot be written.
    """
    path = folder / UNSENT_FILE
    write_json(path, {"schema": _SCHEMA, "version": _VERSION, **asdict(run)})
    return path


def read_unsent(path: Path) -> UnsentRun:
    """Read the run in `path`.

    Raises `SpecError` if the file is missing, damaged, of another kind, or newer than this code.
    """
    document = read_document(path, _SCHEMA, _VERSION)
    values: dict[str, Any] = {}
    for part in fields(UnsentRun):
        if part.name not in document:
            raise SpecError(f"{path} is damaged (no {part.name}); run the job again")
        values[part.name] = document[part.name]
    for name, is_right in _CHECKS.items():
        if not is_right(values[name]):
            raise SpecError(f"{path} is damaged ({name}: {values[name]!r}); run the job again")
    return UnsentRun(**values)


def _is_inside(artifacts: object) -> bool:
    """Return whether a path is None, or stays below the folder that it is relative to."""
    if artifacts is None:
        return True
    if not isinstance(artifacts, str):
        return False
    path = Path(os.path.normpath(artifacts))
    return not path.is_absolute() and path.parts[:1] != ("..",)


def _is_text_by_name(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(text, str) for text in values.values())


def _is_number(value: object) -> bool:
    # bool is a subclass of int.
    return type(value) in (int, float) and abs(cast("float", value)) < _MOST_METRIC


def _is_series(points: object) -> bool:
    return isinstance(points, list) and all(
        isinstance(point, list)
        and len(point) == 2
        and type(point[0]) is int
        and 0 <= point[0] < _MOST_MS
        and _is_number(point[1])
        for point in points
    )


def _is_table(columns: object) -> bool:
    """Return whether a table has columns of equal length."""
    if not isinstance(columns, dict) or not all(isinstance(c, list) for c in columns.values()):
        return False
    return len({len(column) for column in columns.values()}) <= 1


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **{
        name: lambda text: isinstance(text, str)
        for name in ("record_id", "name", "uri", "experiment")
    },
    **{
        name: lambda time_ms: type(time_ms) is int and 0 <= time_ms < _MOST_MS
        for name in ("start_ms", "end_ms")
    },
    **{name: lambda text: text is None or isinstance(text, str) for name in ("run_id", "left_out")},
    "metrics": lambda metrics: isinstance(metrics, dict) and all(map(_is_number, metrics.values())),
    "series": lambda series: isinstance(series, dict) and all(map(_is_series, series.values())),
    "tables": lambda tables: isinstance(tables, dict) and all(map(_is_table, tables.values())),
    "status": lambda status: status in ("FINISHED", "FAILED", "KILLED"),
    # A run without an outcome would stay RUNNING.
    "tags": lambda tags: _is_text_by_name(tags) and bool(tags.get(OUTCOME)),
    "params": _is_text_by_name,
    "artifacts": _is_inside,
}
"""Checks of the fields of a file, which may come from somebody else."""


def unsent_files(root: Path) -> list[Path]:
    """Return the files with unsent runs below `root`, sorted by name."""
    paths = []
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name != _COPIES)
        if UNSENT_FILE in files:
            paths.append(Path(folder) / UNSENT_FILE)
    return paths


def send_unsent(root: Path, tracker: Tracker) -> int:
    """Log the unsent runs below `root` that are meant for `tracker`, and return their number.

    Safe against kills at any moment and against other senders: each run is logged once. A file that
    cannot be read is left alone; `python -m runner.send` reports it.

    Raises `TrackingError` if the store fails; the remaining runs stay on disk.
    """
    sent = 0
    for path in unsent_files(root):
        with suppress(SpecError):
            sent += send_file(path, lambda run: tracker if run.place == tracker.place else None)
    return sent


def send_file(path: Path, tracker_of: Callable[[UnsentRun], Tracker | None]) -> bool:
    """Log the run in `path`, if `tracker_of` has a tracker for it, and remove the file.

    Return whether it was sent, which it is not while another process is sending it. Raises
    `SpecError` if the file cannot be read, and the errors of the tracker.
    """
    with _claimed(path) as is_ours:
        if not is_ours:
            return False
        run = read_unsent(path)
        _refuse_links(path.parent / (run.artifacts or ""))
        tracker = tracker_of(run)
        if tracker is None:
            return False
        tracker.send(run, path.parent)
        path.unlink()
        return True


def _refuse_links(folder: Path) -> None:
    """Raise `SpecError` for symlinks below `folder`: their targets would be sent with the run."""
    for below, inner, files in os.walk(folder):
        for name in (*inner, *files):
            link = Path(below) / name
            if link.is_symlink():
                raise SpecError(f"{link} is a link, which is not sent; replace it by a file")


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Lock `path` against other senders, and yield whether we have it and it still exists.

    A process that dies releases its lock, and the file stays.
    """
    try:
        file = path.open("r+b")  # opened for writing, which locks on network file systems need
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another process, or a file system without locks
            yield False
            return
        yield _is_at(path, file.fileno())


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the file that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
