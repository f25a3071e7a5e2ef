"""What spans the jobs of a sweep: the parent run in MLflow, and the table at the end.

Hydra calls the callback in the process that launches, and hands each job a copy of it, with the id
of the parent run in it, whatever the launcher.
"""

import atexit
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from fxpart.errors import SpecError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.tracking import RunStatus, Tracker

__all__ = ["SweepCallback", "exit_code", "parent_run_id"]

_state: dict[str, Any] = {"parent": None, "exit_code": None}
"""Of this process: the parent of the job that runs, and how the sweep ended."""


def parent_run_id() -> str | None:
    """Return the run of the sweep that the current job belongs to, None outside a sweep."""
    found: str | None = _state["parent"]
    return found


def exit_code() -> int | None:
    """Return the exit code of the sweep that this process led, None if it led none."""
    found: int | None = _state["exit_code"]
    return found


class SweepCallback(Callback):
    """Opens the parent run before the jobs, and ranks what came of them after."""

    def __init__(self) -> None:
        self.parent: str | None = None
        self._tracker: Tracker | None = None

    def __getstate__(self) -> dict[str, object]:
        """Go to the jobs without the connection, which cannot travel."""
        return {"parent": self.parent, "_tracker": None}

    def on_multirun_start(self, config: "DictConfig", **_: object) -> None:
        """Open the store and the parent run, once, before any job can."""
        from runner.provenance import environment_tags
        from runner.tracking import TrackingConfig, open_tracker

        tracking = config.tracking
        overrides = list(config.hydra.overrides.task)
        self._tracker = open_tracker(
            TrackingConfig(tracking.name, tracking.uri, tracking.experiment), Path.cwd()
        )
        tags = {"kind": "sweep", "overrides": " ".join(overrides), **environment_tags()}
        swept = [o.partition("=")[0] for o in overrides if "," in o.partition("=")[2]]
        self.parent = self._tracker.start_sweep(f"sweep {' x '.join(swept)}".strip(), tags)
        # Hydra does not say when a sweep is broken off, so the parent is closed at exit as well.
        atexit.register(self._close, "KILLED")

    def on_job_start(self, config: "DictConfig", **_: object) -> None:
        """Tell the job in this process whose child it is."""
        _state["parent"] = self.parent

    def on_multirun_end(self, config: "DictConfig", **_: object) -> None:
        """Print the ranking and where to compare; remember the exit code."""
        from runner.announce import announce_page

        folder = Path(config.hydra.sweep.dir)
        statuses = _report(folder)
        failed = any(s == "failed" for s in statuses) or "finished" not in statuses
        _state["exit_code"] = 2 if failed else 0
        if self._tracker:
            page = self._tracker.comparison_page(self.parent)
            self._close("FINISHED")
            announce_page(page)

    def _close(self, status: "RunStatus") -> None:
        if self._tracker and self.parent:
            self._tracker.finish_sweep(self.parent, status)
        self._tracker = None


def _report(folder: Path) -> list[str]:
    """Print the ranked table of the jobs below `folder`; return their statuses."""
    from runner.files import read_result
    from runner.headline import sweep_row
    from runner.job import RESULT_FILE
    from runner.terminal import show, sweep_reasons, sweep_table

    rows, statuses = [], []
    for path in sorted(folder.glob(f"*/{RESULT_FILE}")):
        try:
            result = read_result(path)
        except SpecError as error:
            sys.stderr.write(f"error: {error}\n")
            continue
        statuses.append(result["status"])
        choices = result["config"]["choices"]
        rows.append(sweep_row(choices, result["metrics"], result["status"], result["error"]))
    if rows:
        show(sweep_table(rows), *sweep_reasons(rows))
    return statuses
