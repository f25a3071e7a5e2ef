"""The MLflow tracker. Importing this module is cheap, but opening a store is not."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from runner.config.passwords import without_password
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_opening import Store, open_store
from runner.tracking.mlflow_runs import MlflowRuns
from runner.tracking.mlflow_store import StoreError, refusals, store_uri
from runner.tracking.mlflow_view import page_of, write_view
from runner.tracking.mlflow_write import (
    fill_and_close,
    find_or_make,
    make_run,
    read_file,
    write_some,
)
from runner.tracking.store_tracker import StoreTracker
from runner.tracking.tracker import ComparisonPage, RunStatus, UnsentRun
from runner.tracking.unsent import OpenRun, now_ms

__all__ = ["MlflowTracker"]

_log = logging.getLogger(__name__)
_PAUSE_S = 30.0
"""Time before a failed store is tried again: a thousand jobs must not each wait for it."""


class MlflowTracker(MlflowRuns, StoreTracker):
    """Stores runs in one experiment of an MLflow store; see `Tracker` for the methods."""

    def __init__(self, config: TrackingConfig, root: Path, *, must_answer: bool = True) -> None:
        """Open the store, creating it if it is missing.

        Raises `TrackingError` if the store does not work and `must_answer`.
        """
        super().__init__(None)
        self._config, self.root = config, root
        self.uri = store_uri(config, root)
        """Tracking URI of the store, with its password."""
        self._failed: StoreError | None = None
        self._retry_s = 0.0
        try:
            with self._store():
                pass
        except StoreError:
            if must_answer:
                raise

    @property
    def place(self) -> tuple[str, str]:
        """The URI of the store, without its password, and the experiment."""
        return without_password(self.uri), self._config.experiment

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """Yield the store. Raises `TrackingError` if it fails, and at once soon after a failure."""
        if self._failed and time.monotonic() < self._retry_s:
            raise StoreError(self._failed.what)
        try:
            if self._opened is None:
                self._opened = open_store(self._config, self.root)
            with refusals(self.uri):
                yield self._opened
        except StoreError as error:
            if error.is_gone:
                self._failed, self._retry_s = error, time.monotonic() + _PAUSE_S
            raise
        self._failed = None

    def open_run(self, run: OpenRun) -> str:
        """Create the run in the store, with its parameters; see `StoreTracker.open_run`."""
        with self._store() as store:
            return make_run(store, run.name, run.tags, run.start_ms, run.params)

    def close_run(self, run: UnsentRun, folder: Path) -> str:
        """Log what has not been sent of the run; see `StoreTracker.close_run`."""
        with self._store() as store:
            run_id = run.run_id or find_or_make(store, run)
            unsent = replace(run, params={}) if run.run_id else run
            fill_and_close(store, run_id, unsent, folder)
        return run_id

    def send(self, run: UnsentRun, folder: Path) -> None:
        """Log an unsent run from `folder`; see `Tracker.send`."""
        with self._store() as store:
            fill_and_close(store, find_or_make(store, run), run, folder)

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a sweep and return its id."""
        with self._store() as store:
            return make_run(store, name, {"kind": "sweep", **(tags or {})}, now_ms())

    def reopen_sweep(self, run_id: str) -> None:
        """Mark a parent run as running again."""
        with self._store() as store:
            store.client.update_run(run_id, status="RUNNING")

    def log_sweep(
        self,
        parent_run_id: str | None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """Add results to the parent run; `files` become artifacts with the same names."""
        if parent_run_id is None:
            return
        with self._store() as store:
            write_some(store.client, parent_run_id, metrics or {}, tags or {}, files)

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run of a sweep."""
        if parent_run_id is None:
            return
        with self._store() as store:
            store.client.set_terminated(parent_run_id, status)

    def read_artifact(self, run_id: str, path: str) -> bytes | None:
        """Return the content of a run's file at `path`; None if there is none."""
        with self._store() as store:
            return read_file(store.client, run_id, path)

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Write the view and return its address, which works even without the view."""
        try:
            with self._store() as store:
                write_view(store.client, store.experiment_id, parent_run_id)
        except TrackingError as error:
            _log.warning("the comparison page keeps MLflow's own columns: %s", error)
        if self._opened is None:
            return None
        return page_of(self.uri, self._opened.experiment_id, parent_run_id)
