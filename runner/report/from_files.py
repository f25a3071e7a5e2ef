"""Read a sweep from the files of its jobs, for runs without a store."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError
from runner.job.files import RESULT_FILE
from runner.job.identity import Choices, override_values
from runner.job.record import parameters
from runner.report.from_store import config_value
from runner.report.sweep_data import SweepData, SweepRow
from runner.tracking.mlflow_values import finite_metrics, param_texts

__all__ = ["sweep_from_files"]


def sweep_from_files(
    folder: Path,
    sweep_id: str,
    *,
    title: str = "sweep",
    question: str = "",
    swept: tuple[str, ...] = (),
    started_ms: int | None = None,
    command: str | None = None,
) -> SweepData:
    """Return the sweep with its jobs below `folder`, in the order of their folders.

    Settings and metrics are the same as in MLflow. An unreadable file counts as a failed job,
    unless it is older than `started_ms` and so belongs to another sweep.
    """
    rows = []
    for path in sorted(folder.rglob(RESULT_FILE), key=_numbers_by_size):
        row = _row(path, sweep_id, swept, started_ms)
        if row is not None:
            rows.append(row)
    return SweepData(title, question, swept, tuple(rows), started_ms, command)


def _row(
    path: Path, sweep_id: str, swept: tuple[str, ...], started_ms: int | None
) -> SweepRow | None:
    from runner.output.result_files import read_result

    try:
        result = read_result(path)
        if result.get("sweep") != sweep_id:
            return None
        settings = _settings(result, swept)
        # Rounded to seven digits, as in MLflow.
        rounded = {k: float(f"{v:.7g}") for k, v in result["metrics"].items() if v is not None}
        metrics = finite_metrics(rounded)
    except (SpecError, KeyError, TypeError, ValueError, AttributeError) as error:
        if started_ms is not None and path.stat().st_mtime * 1e3 < started_ms:
            return None
        reason = str(error) if isinstance(error, SpecError) else f"{path} is damaged; run it again"
        return SweepRow(path.parent.name, {}, {}, "failed", reason, None, str(path.parent))
    return SweepRow(
        name=path.parent.name,
        settings=settings,
        metrics=metrics,
        status=str(result["status"]),
        error=result["error"],
        run_id=result.get("run_id"),
        folder=str(path.parent),
    )


def _settings(result: Mapping[str, Any], swept: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters as in MLflow."""
    from runner.config.tags import config_from_document

    described = result["config"]
    choices, overrides = described["choices"], described["overrides"]
    resolved = described.get("resolved")
    if resolved is None:  # an invalid configuration has only its overrides
        return param_texts({**override_values(overrides), **choices})
    config = config_from_document(resolved)
    settings = param_texts(parameters(config, Choices(**choices), overrides))
    for key in swept:
        text = config_value(resolved, key)
        if key not in settings and text is not None:
            settings[key] = text
    return settings


def _numbers_by_size(path: Path) -> list[str | int]:
    # Text and numbers alternate, so that text is compared with text.
    return [int(p) if p.isdigit() else p for p in re.split(r"([0-9]+)", str(path))]
