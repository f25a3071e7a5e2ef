"""An MLflow tracker in a process of its own, which imports MLflow while this one plans.

In a thread, those seconds of imports would hold Python's lock.
"""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TypeVar, cast

from fxpart.errors import FxpartError
from fxpart.support.garbage import collect_rarely
from fxpart.support.signals import held_back
from runner.config.passwords import without_password
from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_opening import disconnect
from runner.tracking.mlflow_store import StoreError, sqlite_path, store_uri
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.store_tracker import StoreTracker
from runner.tracking.tracker import Tracker

__all__ = ["TrackerProcess", "serve"]

_EXIT_S = 5.0
"""Longest wait for the other process, which ends at once unless it is busy."""
_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They go to all processes of a terminal or a batch job. This one handles them, and its run is
logged as killed by the other process, which therefore ignores them."""


def _forwarded(method: Callable[..., _T]) -> Callable[..., _T]:
    """Return a method that calls `method` of the tracker in the other process."""

    @wraps(method)
    def call(self: "TrackerProcess", *args: object, **kwargs: object) -> _T:
        return cast("_T", self._call(method.__name__, *args, **kwargs))

    return call


class TrackerProcess(StoreTracker):
    """A `MlflowTracker` in another process, to be used in a ``with`` block; see `Tracker`.

    The process ends with the block, or with this process. Arguments and results must be picklable.
    """

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        """Start opening the store. Raises `TrackingError` if `config` names none."""
        self._place = without_password(store_uri(config, root)), config.experiment
        self.root = root
        self._has_opened = False
        self._connection, theirs = Pipe()
        handle = theirs.fileno()
        # Not by multiprocessing, which would run the program of the user again as a module.
        imports = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        command = [sys.executable, "-c", f"{imports}; serve({handle})"]
        with held_back(*_SIGNALS), theirs:
            self._process = Popen(command, stdin=DEVNULL, pass_fds=[handle])
        with suppress(OSError):  # it has ended, so there will be no answer
            self._connection.send((config, root))

    def __enter__(self) -> "TrackerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        with suppress(TimeoutExpired):  # in a call that was interrupted; it ends after that
            self._process.wait(_EXIT_S)

    @property
    def place(self) -> tuple[str, str]:
        """The URI of the store, without its password, and the experiment."""
        return self._place

    def is_open(self) -> bool:
        """Wait until the store is open; return False if the process has ended instead.

        Raises `TrackingError` if the store does not work.
        """
        if not self._has_opened:
            try:
                self._answer()
            except _EndedError:
                return False
            self._has_opened = True
        return True

    def _call(self, method: str, *args: object, **kwargs: object) -> object:
        self.is_open()  # whose answer comes first
        with suppress(OSError):  # it has ended, so there will be no answer
            self._connection.send((method, args, kwargs))
        return self._answer()

    def _answer(self) -> object:
        """Return the next answer."""
        try:
            value, error = self._connection.recv()
        except (EOFError, OSError) as ended:
            problem = f"tracking at {self._place[0]} failed: the process that logs has ended"
            raise _EndedError(problem) from ended
        except BaseException:  # an interrupt: the answer would be taken for that to another call
            self._connection.close()
            raise
        if error is not None:
            raise error
        return value

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


class _EndedError(StoreError):
    """The other process has ended."""


def serve(handle: int) -> None:
    """Answer that the store is open, then calls, until the other process closes the connection.

    `handle` is that of the connection, which brings the arguments of `MlflowTracker` first.
    """
    collect_rarely()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with suppress(EOFError, OSError), Connection(handle) as connection:
        config, root = connection.recv()
        try:
            tracker = MlflowTracker(config, root)
        except Exception as error:  # raised by the other process
            connection.send((None, _portable(error)))
        else:
            connection.send((None, None))
            _answer_calls(connection, tracker)
    # The other process waits, and to take MLflow's modules apart would take a second.
    os._exit(0)


def _answer_calls(connection: Connection, tracker: MlflowTracker) -> None:
    with suppress(EOFError, OSError):
        while True:
            method, args, kwargs = connection.recv()
            connection.send(_answer_of(partial(getattr(tracker, method), *args, **kwargs)))
    if (database := sqlite_path(tracker.uri)) is not None:
        disconnect(database)


def _answer_of(call: Callable[[], object]) -> tuple[object, Exception | None]:
    """Return the result and the error of a call, one of them None."""
    try:
        return call(), None
    except Exception as error:  # raised by the other process
        return None, _portable(error)


def _portable(error: Exception) -> Exception:
    """Return `error` if it can be pickled, else one with its text; a bug with its traceback."""
    if not isinstance(error, FxpartError):
        error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a constructor with other arguments, or a value of any kind
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
