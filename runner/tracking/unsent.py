"""Runs that could not be logged: kept on disk, in the folder of the job, until the store is back.

A file is written whole or not at all, and goes when its run is in the store. The store knows each
run by its record from the moment it is made, so that a run that is sent twice is there once.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError
from fxpart.support.json_file import read_document
from runner.output.text_files import write_json
from runner.tracking.tracker import Tracker, UnsentRun

__all__ = [
    "UNSENT_FILE",
    "read_unsent",
    "send_file",
    "send_unsent",
    "unsent_files",
    "write_unsent",
]

UNSENT_FILE = "unsent.json"
SCHEMA, VERSION = "fxpart.unsent", 1
_COPIES = "mlartifacts"
"""What MLflow keeps of the folders of jobs."""


def write_unsent(folder: Path, run: UnsentRun) -> Path:
    """Write `run` to `UNSENT_FILE` in `folder` and return the file.

    Raises `CacheError` when the place cannot be written.
    """
    path = folder / UNSENT_FILE
    write_json(path, {"schema": SCHEMA, "version": VERSION, **asdict(run)})
    return path


def read_unsent(path: Path) -> UnsentRun:
    """Return the run that `path` keeps.

    Raises `SpecError` when the file is missing, damaged, of another kind, or newer than this code.
    """
    document = read_document(path, SCHEMA, VERSION)
    known: dict[str, Any] = {}
    for part in fields(UnsentRun):
        if part.name not in document:
            raise SpecError(f"{path} is damaged (no {part.name}); run the job again")
        known[part.name] = document[part.name]
    return UnsentRun(**known)


def unsent_files(root: Path) -> list[Path]:
    """Return the files below `root` that keep runs, in the order of their names."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name != _COPIES)
        if UNSENT_FILE in files:
            found.append(Path(folder) / UNSENT_FILE)
    return found


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold `path` against other senders; yield whether it is ours and still there.

    What falls with the process that holds it is only the claim: the file stays.
    """
    try:
        file = path.open("r+b")  # which a network file system wants for a lock
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process is at it, or nobody can tell
            yield False
            return
        yield _is_at(path, file.fileno())


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the file that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def send_unsent(root: Path, tracker: Tracker) -> int:
    """Log the runs kept below `root` that were meant for `tracker`; return how many.

    Safe against a kill at any moment and against other senders: each run is logged once. A file
    that cannot be read is left alone; `python -m runner.send` names it.

    Raises `TrackingError` when the store fails; what is not sent by then stays where it is.
    """
    sent = 0
    for path in unsent_files(root):
        with suppress(SpecError):
            sent += send_file(path, lambda run: tracker if run.place == tracker.place else None)
    return sent


def send_file(path: Path, tracker_of: Callable[[UnsentRun], Tracker | None]) -> bool:
    """Log the run that `path` keeps, where `tracker_of` has a tracker for it, and remove the file.

    Return whether it did: not while another process is at it. Raises `SpecError` for a file that
    cannot be read, and what the tracker raises.
    """
    with _claimed(path) as is_ours:
        if not is_ours:
            return False
        run = read_unsent(path)
        tracker = tracker_of(run)
        if tracker is None:
            return False
        tracker.send(run, path.parent)
        path.unlink()
        return True
