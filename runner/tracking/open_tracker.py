"""Open the tracker of a configuration, once per process."""

import os
from pathlib import Path

from fxpart.errors import SpecError, nearest_names
from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_store import sqlite_path, store_uri
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.tracker import Tracker

__all__ = ["is_file", "open_tracker"]

_NAMES = ("mlflow", "none")
_trackers: dict[tuple[object, ...], MlflowTracker] = {}
"""This process's trackers by store: opening a store takes as long as logging a run."""


def is_file(config: TrackingConfig, root: Path) -> bool:
    """Return whether the tracker of `config` keeps runs in a file, which is opened quickly."""
    return config.name == "mlflow" and sqlite_path(store_uri(config, root)) is not None


def open_tracker(config: TrackingConfig, root: Path, *, must_answer: bool = True) -> Tracker:
    """Return the tracker of `config` with its store open; `root` is the folder of ``outputs``.

    A process opens each store once and reuses its tracker. A store that need not answer, as for a
    job of a running sweep, is tried again with each run.

    Raises `SpecError` for an unknown tracker, and `TrackingError` if the store does not work.
    """
    if config.name == "none":
        return Tracker()
    if config.name != "mlflow":
        suggestion = nearest_names(config.name, _NAMES)
        raise SpecError(f"tracking={config.name} does not exist; {suggestion}")
    uri = store_uri(config, root)
    tracker = _trackers.get(_key(config, uri))
    if tracker is None:
        tracker = MlflowTracker(config, root, must_answer=must_answer)
        _trackers[_key(config, uri)] = tracker  # the key of a file changes when it is created
    return tracker


def _key(config: TrackingConfig, uri: str) -> tuple[object, ...]:
    """Return the key of a shared tracker. A file that was replaced is another store."""
    database = sqlite_path(uri)
    inode = database.stat().st_ino if database and database.exists() else None
    return os.getpid(), uri, config.experiment, inode
