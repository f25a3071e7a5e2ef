"""The tracker that keeps runs in MLflow. Importing this module is cheap, opening a store is not."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fxpart.errors import CacheError
from runner.config.passwords import without_password
from runner.config.paths import shown_path
from runner.config.sections import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_artifacts import keep_files, read_file
from runner.tracking.mlflow_database import open_database
from runner.tracking.mlflow_find import unknown_run
from runner.tracking.mlflow_page import page_of, write_view
from runner.tracking.mlflow_runs import PARENT, SWEEPS, MlflowRuns
from runner.tracking.mlflow_store import StoreError, open_store, refusals, sqlite_path, store_uri
from runner.tracking.mlflow_write import (
    MadeRun,
    Store,
    fill_and_close,
    find_or_make,
    make_run,
    write_some,
)
from runner.tracking.open_run import OpenRun, now_ms
from runner.tracking.tracker import ComparisonPage, LoggedRun, RunLog, RunStatus, UnsentRun
from runner.tracking.unsent import write_unsent

__all__ = ["MlflowTracker", "shared_tracker"]

_log = logging.getLogger(__name__)
_PAUSE_S = 30.0
"""For so long a store that failed is not asked again: a thousand jobs must not each wait for it."""


class MlflowTracker:
    """Keeps runs in one experiment of an MLflow store; see `Tracker` for what each method does."""

    def __init__(self, config: TrackingConfig, root: Path, *, must_answer: bool = True) -> None:
        """Open the store, and make it first if it is missing.

        Raises `TrackingError` for a store that does not work, unless it need not answer.
        """
        self._config, self._root = config, root
        self.uri = store_uri(config, root)
        """Of the store, with its password."""
        self._open: Store | None = None
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
        """The store, without its password, and the experiment."""
        return without_password(self.uri), self._config.experiment

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """Yield the store; what fails is a `TrackingError`, at once while it is gone."""
        if self._failed and time.monotonic() < self._retry_s:
            raise StoreError(self._failed.what)
        try:
            if self._open is None:
                client, uri, experiment_id = open_store(self._config, self._root)
                database = open_database(uri)
                runs = MlflowRuns(client, experiment_id, database)
                place = client.get_experiment(experiment_id).artifact_location
                self._open = Store(client, experiment_id, place, database, runs)
            with refusals(self.uri):
                yield self._open
        except StoreError as error:
            if error.is_gone:
                self._failed, self._retry_s = error, time.monotonic() + _PAUSE_S
            raise
        self._failed = None

    @contextmanager
    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
        folder: Path | None = None,
    ) -> Iterator[RunLog]:
        """Open a run; see `Tracker.start`.

        Parameters go first, so that a process that is killed outright still shows what it was.
        """
        parent = {PARENT: parent_run_id} if parent_run_id else {}
        run = _LiveRun(run_name, params, {"kind": "run", **parent, **(tags or {})}, self.place)
        try:
            self._begin(run)
        except TrackingError:
            if folder is None:
                raise
        try:
            yield run
        except BaseException as error:
            self._end(run, folder, error)
            raise
        self._end(run, folder)

    def _begin(self, run: "_LiveRun") -> None:
        with self._store() as store:
            run.made = make_run(store, run.name, run.tags, run.start_ms, run.params)
            run.run_id = run.made.run_id

    def _end(
        self, run: "_LiveRun", folder: Path | None, error: BaseException | None = None
    ) -> None:
        """Log all of the run, or keep it in `folder`; an `error` matters more than its mark."""
        ended = run.ended(folder or Path.cwd(), error)
        try:
            self._write(run, ended, folder or Path.cwd())
        except TrackingError as failed:
            if folder is not None:
                _keep(run, ended, folder, failed)
            elif error is None:
                raise
            else:
                _log.warning("the run %s could not be marked as failed: %s", run.run_id, failed)

    def _write(self, run: "_LiveRun", ended: UnsentRun, folder: Path) -> None:
        if run.made is None:
            run.run_id = self._send(ended, folder)
            return
        with self._store() as store:
            fill_and_close(store, run.made, replace(ended, params={}), folder)

    def send(self, run: UnsentRun, folder: Path) -> None:
        """Log a run that was kept in `folder`; see `Tracker.send`."""
        self._send(run, folder)

    def _send(self, run: UnsentRun, folder: Path) -> str:
        with self._store() as store:
            made = find_or_make(store, run)
            fill_and_close(store, made, run, folder)
            return made.run_id

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str:
        """Open the parent run of a sweep and return its id."""
        with self._store() as store:
            all_tags = {"kind": "sweep", **(tags or {})}
            return make_run(store, name, all_tags, now_ms()).run_id

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
        """Add to the parent run; `files` become artifacts under their own names."""
        if parent_run_id is None:
            return
        with self._store() as store:
            write_some(store, parent_run_id, metrics or {}, tags or {})
            keep_files(store.client, parent_run_id, files)

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run of a sweep."""
        if parent_run_id is None:
            return
        with self._store() as store:
            store.client.set_terminated(parent_run_id, status)

    def run(self, run_id: str) -> LoggedRun:
        """Return one run. Raises `SpecError` when there is none of that id."""
        with self._store() as store:
            found = store.runs.one(run_id)
        if found is None:
            raise unknown_run(run_id, self.uri)
        return found

    def read_artifact(self, run_id: str, path: str) -> bytes | None:
        """Return what a run's file says, None when the run has no file at `path`."""
        with self._store() as store:
            return read_file(store.client, run_id, path)

    def runs(self, tags: Mapping[str, str]) -> list[LoggedRun]:
        """Return the runs that have all these tags with these values, the oldest first."""
        with self._store() as store:
            return store.runs.search.having(tags)

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, those of others too, the oldest first."""
        with self._store() as store:
            return store.runs.search.containing(SWEEPS, f" {sweep_id} ")

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return, by its value of `tag`, the newest result that stands; see `Tracker.settled`."""
        with self._store() as store:
            return store.runs.settled(tag, values, stands)

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values that came to no result, the oldest first."""
        with self._store() as store:
            return store.runs.unfinished(tag, values)

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died: KILLED, and no longer of its sweep."""
        with self._store() as store:
            store.runs.mark_cut_off(run_id, reason)

    def supersede(self, run_id: str) -> None:
        """Take a failed run, which is done again, out of its sweep; the error stays with it."""
        with self._store() as store:
            store.runs.supersede(run_id)

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Note that these runs belong to a sweep too."""
        with self._store() as store:
            store.runs.join_sweep(run_ids, sweep_id)

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Write the view and return its address; without the view the address still opens."""
        try:
            with self._store() as store:
                write_view(store.client, store.experiment_id, parent_run_id)
        except TrackingError as error:
            _log.warning("the comparison page keeps MLflow's own columns: %s", error)
        if self._open is None:
            return None
        return page_of(self.uri, self._open.experiment_id, parent_run_id)


class _LiveRun(OpenRun):
    """A run that the store may know already."""

    made: MadeRun | None = None
    """None while the store has not said that it made the run, with its parameters."""


def _keep(run: _LiveRun, ended: UnsentRun, folder: Path, failed: TrackingError) -> None:
    what = failed.what if isinstance(failed, StoreError) else str(failed)
    try:
        run.unsent = write_unsent(folder, ended)
        kept = f"the run is kept in {shown_path(run.unsent)}; send it with `python -m runner.send`"
        run.problem = f"{what}; {kept}"
    except CacheError as also:
        run.problem = f"{what}; {also}"


_trackers: dict[tuple[object, ...], MlflowTracker] = {}
"""Of this process, by where they keep runs: opening a store takes as long as logging a run."""


def shared_tracker(config: TrackingConfig, root: Path, *, must_answer: bool) -> MlflowTracker:
    """Return the tracker of this process for that store and experiment; see `open_tracker`."""
    uri = store_uri(config, root)
    database = sqlite_path(uri)
    # A file that was replaced is another store, and a connection does not outlive a fork.
    file = database.stat().st_ino if database and database.exists() else None
    key = (os.getpid(), uri, config.experiment, file)
    if key not in _trackers:
        tracker = MlflowTracker(config, root, must_answer=must_answer)
        made = database.stat().st_ino if database and database.exists() else None
        key = (os.getpid(), uri, config.experiment, made)
        _trackers[key] = tracker
    return _trackers[key]
