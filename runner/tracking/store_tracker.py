"""A tracker with a store: how it opens and closes a run, and keeps one that the store refuses."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fxpart.errors import CacheError
from runner.config.paths import shown_path
from runner.errors import TrackingError
from runner.tracking.mlflow_runs import PARENT
from runner.tracking.mlflow_store import StoreError
from runner.tracking.tracker import RunLog, Tracker, UnsentRun
from runner.tracking.unsent import OpenRun, send_command, write_unsent

__all__ = ["StoreTracker"]

_log = logging.getLogger(__name__)


class StoreTracker(Tracker, ABC):
    """A tracker whose runs are in a store; subclasses reach it."""

    root: Path
    """The folder of ``outputs``."""

    @abstractmethod
    def open_run(self, run: OpenRun) -> str:
        """Create a run with its parameters and return its id. Raises `TrackingError`."""

    @abstractmethod
    def close_run(self, run: UnsentRun, folder: Path) -> str:
        """Log an ended run from `folder`, close it, and return its id.

        It is created, or found if a part of it was sent before, unless it has an id: then its
        parameters are stored already. Raises `TrackingError`.
        """

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

        It is created with its parameters, so that they are known even if the process is killed.
        """
        parent = {PARENT: parent_run_id} if parent_run_id else {}
        run = OpenRun(run_name, params, {"kind": "run", **parent, **(tags or {})}, self.place)
        try:
            run.run_id = self.open_run(run)
        except TrackingError:
            if folder is None:
                raise
        try:
            yield run
        except BaseException as error:
            self._end(run, folder, error)
            raise
        self._end(run, folder)

    def _end(self, run: OpenRun, folder: Path | None, error: BaseException | None = None) -> None:
        """Log the run, or write it to `folder`; an `error` of the run takes precedence."""
        ended = run.ended(folder or Path.cwd(), error)
        try:
            run.run_id = self.close_run(ended, folder or Path.cwd())
        except TrackingError as failed:
            if folder is not None:
                _keep(run, ended, folder, self.root, failed)
            elif error is None:
                raise
            else:
                _log.warning("the run %s could not be marked as failed: %s", run.run_id, failed)


def _keep(run: OpenRun, ended: UnsentRun, folder: Path, root: Path, failed: TrackingError) -> None:
    reason = failed.what if isinstance(failed, StoreError) else str(failed)
    try:
        path = write_unsent(folder, ended)
        command = send_command(ended.uri, root)
        advice = f"the run is kept in {shown_path(path)}; send it with `{command}`"
        run.problem = f"{reason}; {advice}"
    except CacheError as unwritten:
        run.problem = f"{reason}; {unwritten}"
