"""An MLflow tracker in a process of its own: its imports, of some seconds, take no time of ours.

In a thread they would: Python's lock is held by one thread at a time.
"""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, cast

from fxpart.errors import FxpartError
from runner.config.passwords import without_password
from runner.config.sections import TrackingConfig
from runner.tracking.mlflow_store import StoreError, store_uri
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.store_tracker import StoreTracker
from runner.tracking.tracker import Tracker

__all__ = ["TrackerProcess"]

_T = TypeVar("_T")
_OPENED = 0
"""Number of the answer when the store is open; calls follow."""


def _forwarded(method: Callable[..., _T]) -> Callable[..., _T]:
    """Return a method that calls `method` of the tracker in the other process."""

    @wraps(method)
    def call(self: "TrackerProcess", *args: object, **kwargs: object) -> _T:
        return cast("_T", self._call(method.__name__, *args, **kwargs))

    return call


class TrackerProcess(StoreTracker):
    """A `MlflowTracker` in another process, which ends with this one; see `Tracker`.

    Arguments and results must be picklable.
    """

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        """Start opening the store. Raises `TrackingError` if `config` names none."""
        self._place = without_password(store_uri(config, root)), config.experiment
        self.root = root
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, config, root), daemon=True).start()
        theirs.close()
        self._numbers = count(_OPENED + 1)

    @property
    def place(self) -> tuple[str, str]:
        """The URI of the store, without its password, and the experiment."""
        return self._place

    def wait_until_open(self) -> None:
        """Wait until the store is open. Raises `TrackingError` if it does not work."""
        self._answer(_OPENED)

    def _call(self, method: str, *args: object, **kwargs: object) -> object:
        number = next(self._numbers)
        with self._failures():
            self._connection.send((number, method, args, kwargs))
        return self._answer(number)

    def _answer(self, number: int) -> object:
        with self._failures():
            answered, value, error = self._connection.recv()
            while answered != number:  # an interrupt may have left an earlier answer unread
                answered, value, error = self._connection.recv()
        if error is not None:
            raise error
        return value

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as ended:
            problem = f"tracking at {self._place[0]} failed: the process that logs has ended"
            raise StoreError(problem) from ended

    open_run = _forwarded(MlflowTracker.open_run)
    close_run = _forwarded(MlflowTracker.close_run)
    run = _forwarded(Tracker.run)
    runs = _forwarded(Tracker.runs)
    runs_of_sweep = _forwarded(Tracker.runs_of_sweep)
    settled = _forwarded(Tracker.settled)
    unfinished = _forwarded(Tracker.unfinished)
    mark_cut_off = _forwarded(Tracker.mark_cut_off)
    supersede = _forwarded(Tracker.supersede)
    join_sweep = _forwarded(Tracker.join_sweep)
    start_sweep = _forwarded(Tracker.start_sweep)
    reopen_sweep = _forwarded(Tracker.reopen_sweep)
    log_sweep = _forwarded(Tracker.log_sweep)
    finish_sweep = _forwarded(Tracker.finish_sweep)
    read_artifact = _forwarded(Tracker.read_artifact)
    send = _forwarded(Tracker.send)
    comparison_page = _forwarded(Tracker.comparison_page)


def _serve(connection: Connection, config: TrackingConfig, root: Path) -> None:
    """Answer calls until the other process ends; an interrupt is for that one to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError), connection:
        tracker = _answered(connection, _OPENED, lambda: MlflowTracker(config, root))
        while tracker is not None:
            number, method, args, kwargs = connection.recv()
            _answered(connection, number, partial(getattr(tracker, method), *args, **kwargs))


def _answered(connection: Connection, number: int, work: Callable[[], _T]) -> _T | None:
    """Send the result of `work`, or its error, and return it; None for an error."""
    try:
        result = work()
    except Exception as error:  # raised by the other process
        if not isinstance(error, FxpartError):
            error.add_note(traceback.format_exc())
        connection.send((number, None, error))
        return None
    connection.send((number, None if number == _OPENED else result, None))
    return result
