"""What spans the jobs of a sweep: the parent run in MLflow, and the table at the end.

Hydra calls the callback in the process that launches, and hands each job a copy of it, with the ids
of the sweep in it, whatever the launcher.
"""

import atexit
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.experimental.callback import Callback

from fxpart.errors import FxpartError, SpecError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.tracking import RunStatus, Tracker, TrackingConfig

__all__ = ["CallbackError", "SweepCallback", "SweepIds", "current_sweep", "exit_code"]


class CallbackError(BaseException):
    """Carries what a callback raised, its cause, past Hydra, which makes a warning of it."""


@dataclass(frozen=True, slots=True)
class SweepIds:
    """What a job knows of the sweep that it belongs to."""

    sweep: str
    """In `result.json` of each job."""
    parent_run: str | None
    """The sweep's run in MLflow, where one is kept."""


_state: dict[str, Any] = {"ids": None, "exit_code": None}
"""Of this process: the sweep of the job that runs, and how the sweep ended."""


def current_sweep() -> SweepIds | None:
    """Return the sweep that the current job belongs to, None outside a sweep."""
    found: SweepIds | None = _state["ids"]
    return found


def exit_code() -> int | None:
    """Return the exit code of the sweep that this process led, None if it led none."""
    found: int | None = _state["exit_code"]
    return found


@contextmanager
def _heard() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CallbackError from error


class SweepCallback(Callback):
    """Opens the parent run before the jobs, and ranks what came of them after."""

    def __init__(self) -> None:
        self.ids: SweepIds | None = None
        self._tracker: Tracker | None = None
        self._start_s = 0.0
        self._jobs = 0

    def __getstate__(self) -> dict[str, object]:
        """Go to the jobs without the connection, which cannot travel."""
        return {**self.__dict__, "_tracker": None}

    def on_multirun_start(self, config: "DictConfig", **_: object) -> None:
        """Open the store and the parent run, once, before any job can."""
        with _heard():
            self._open(config)

    def _open(self, config: "DictConfig") -> None:
        from omegaconf import OmegaConf

        from runner.provenance import environment_tags
        from runner.tracking import open_tracker

        overrides = list(config.hydra.overrides.task)
        self._start_s = time.time()
        tracking = cast("TrackingConfig", OmegaConf.to_object(config.tracking))
        self._tracker = open_tracker(tracking, Path.cwd())
        tags = {"kind": "sweep", "overrides": " ".join(overrides), **environment_tags()}
        name = f"sweep {' x '.join(_swept(overrides))}".strip()
        self.ids = SweepIds(secrets.token_hex(8), self._tracker.start_sweep(name, tags))
        # Hydra does not say when a sweep is broken off, so the parent is closed at exit as well.
        atexit.register(self._close_at_exit)

    def on_job_start(self, config: "DictConfig", **_: object) -> None:
        """Tell the job in this process whose child it is."""
        _state["ids"] = self.ids
        self._jobs += 1

    def on_multirun_end(self, config: "DictConfig", **_: object) -> None:
        """Print the ranking and where to compare; remember the exit code."""
        with _heard():
            self._rank(Path(config.hydra.sweep.dir))

    def _rank(self, folder: Path) -> None:
        from runner.announce import announce_page

        assert self.ids is not None
        results, unreadable = _results(folder, self.ids.sweep, self._start_s)
        # A launcher that starts processes counts none here.
        lost = self._jobs - len(results) - len(unreadable)
        if lost > 0:
            unreadable.append(f"{lost} of {self._jobs} jobs left no result below {folder}")
        _state["exit_code"] = 0 if _report(results, unreadable) else 2
        if self._tracker:
            page = self._tracker.comparison_page(self.ids.parent_run)
            self._close("FINISHED")
            announce_page(page)

    def _close(self, status: "RunStatus") -> None:
        tracker, self._tracker = self._tracker, None
        if tracker and self.ids:
            tracker.finish_sweep(self.ids.parent_run, status)

    def _close_at_exit(self) -> None:
        try:
            self._close("KILLED")
        except FxpartError as error:
            sys.stderr.write(f"error: {error}\n")


def _swept(overrides: list[str]) -> list[str]:
    """Return the keys that have several values; a list is one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    return [o.get_key_element().lstrip("+") for o in parsed if o.is_sweep_override()]


def _results(folder: Path, sweep: str, start_s: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the jobs of this sweep left, in their order, and what is wrong with others.

    A file that cannot be read may be an older sweep's: then it is left alone.
    """
    from runner.files import read_result
    from runner.job import RESULT_FILE

    results, unreadable = [], []
    for path in sorted(folder.rglob(RESULT_FILE), key=_numbers_by_size):
        try:
            result = read_result(path)
        except SpecError as error:
            if path.stat().st_mtime >= start_s:
                unreadable.append(str(error))
            continue
        if result.get("sweep") == sweep:
            results.append(result)
    return results, unreadable


def _numbers_by_size(path: Path) -> list[str | int]:
    # Text and numbers alternate, so that like is compared with like.
    return [int(p) if p.isdigit() else p for p in re.split(r"([0-9]+)", str(path))]


def _report(results: list[dict[str, Any]], unreadable: list[str]) -> bool:
    """Print the ranked table of the jobs; return whether all is well.

    It is when a job has a result, and the others at most do not fit.
    """
    from runner.ranking import sweep_reasons, sweep_row, sweep_table
    from runner.terminal import show

    rows = [sweep_row(result) for result in results]
    if rows:
        show(sweep_table(rows), *sweep_reasons(rows))
    for line in unreadable:
        sys.stderr.write(f"error: {line}\n")
    statuses = [result["status"] for result in results]
    unrecorded = any(r["status"] == "finished" and r["error"] for r in results)
    return "finished" in statuses and not ("failed" in statuses or unrecorded or unreadable)
