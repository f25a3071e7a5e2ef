"""A run under way: what it finds is collected, and decided as one record when it is closed."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from fxpart.errors import FxpartError, InfeasibleError
from runner.tracking.mlflow_values import finite_metrics, param_texts, thin
from runner.tracking.tracker import Columns, RunStatus, Series, UnsentRun

__all__ = ["OUTCOME", "RECORD", "OpenRun"]

OUTCOME, RECORD = "outcome", "record_id"
"""Tags: how a run ended, set with the last thing that is logged; and the record it comes from."""
_FEASIBLE = "feasible"


class OpenRun:
    """Collects what belongs to one run. It is a `RunLog`."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        store: tuple[str, str],
    ) -> None:
        """Begin now; `store` is the place without a password, and the experiment."""
        self.name, self.record_id = name, secrets.token_hex(8)
        self.params = param_texts(params)
        self.tags = {**tags, RECORD: self.record_id}
        self.start_ms = now_ms()
        self.run_id: str | None = None
        self.unsent: Path | None = None
        self.problem: str | None = None
        self._artifacts: Path | None = None
        self._uri, self._experiment = store
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
        """Collect; see `RunLog.log`."""
        self._metrics |= metrics or {}
        self._series |= {name: thin(points) for name, points in (series or {}).items()}
        self._tables |= tables or {}
        self.tags |= tags or {}
        if artifacts_dir is not None:
            self._artifacts, self._left_out = artifacts_dir, left_out

    def ended(self, folder: Path, error: BaseException | None = None) -> UnsentRun:
        """Return the run as it is logged, ended now, by `error` where there was one.

        `folder` is where it is kept, if it must be.
        """
        status, outcome = _end_of(error)
        metrics, tags = self._metrics, dict(self.tags)
        if error is not None:
            tags["error"] = error_text(error)
            if outcome != "cut_off":
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


def _end_of(error: BaseException | None) -> tuple[RunStatus, str]:
    if error is None:
        return "FINISHED", "finished"
    if isinstance(error, InfeasibleError):
        return "FAILED", "infeasible"
    # An interrupt, or the end of the process, says nothing about the job.
    return ("FAILED", "failed") if isinstance(error, Exception) else ("KILLED", "cut_off")


def error_text(error: BaseException) -> str:
    """Return what a run is marked with: what our errors say, and of others the class too."""
    said = str(error).strip()
    if isinstance(error, FxpartError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
