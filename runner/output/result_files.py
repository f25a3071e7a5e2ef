"""`assignment.json` and `result.json`: what a run decided, and what came of it; and a table.

Both say which schema and version they follow. What `assignment.json` says, and how it is read, is
in `fxpart.core.saved_assignment`.
"""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.saved_assignment import assignment_document
from fxpart.core.topology import Topology
from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.errors import SpecError
from fxpart.schedule import ScheduleResult
from fxpart.support.json_file import read_document
from runner.output.text_files import write_json, write_text

__all__ = [
    "Status",
    "device_rows",
    "read_result",
    "schedule_document",
    "write_assignment",
    "write_result",
    "write_table",
]

RESULT = "fxpart.result"
VERSION = 1

Status = Literal["finished", "infeasible", "failed"]


def write_assignment(
    path: Path,
    graph: OpGraph,
    topology: Topology,
    assignment: Assignment,
    model: Mapping[str, object],
) -> None:
    """Write `assignment.json`. `model` is anything that JSON can say about the model.

    Raises `CacheError` when the place cannot be written.
    """
    write_json(path, assignment_document(graph, topology, assignment, model))


def device_rows(evaluation: Evaluation) -> list[dict[str, object]]:
    """Return one row of plain values for each device, used or not."""
    return [
        {
            **{name: getattr(use, name) for name in DeviceUse.__slots__},
            "total_bytes": use.total_bytes,
            "free_bytes": use.free_bytes,
        }
        for use in evaluation.devices
    ]


def schedule_document(result: ScheduleResult) -> dict[str, object]:
    """Return what a schedule comes to, and a row of plain values for each device in use."""
    columns = zip(result.devices, result.busy_s, result.peak_bytes, strict=True)
    return {
        "name": result.name,
        "microbatches": result.microbatches,
        "training": result.training,
        "step_s": result.step_s,
        "bubble_fraction": result.bubble_fraction,
        "throughput_per_s": result.throughput_per_s,
        "devices": [
            {"device": device, "busy_s": busy_s, "peak_bytes": peak}
            for device, busy_s, peak in columns
        ],
    }


def write_result(
    path: Path,
    *,
    status: Status,
    config: Mapping[str, object],
    metrics: Mapping[str, float] | None = None,
    devices: Sequence[Mapping[str, object]] = (),
    peaks: Sequence[Mapping[str, object]] = (),
    schedule: Mapping[str, object] | None = None,
    measured: Mapping[str, object] | None = None,
    error: str | None = None,
    sweep_id: str | None = None,
    key: str | None = None,
    files_read: Mapping[str, str] | None = None,
) -> None:
    """Write `result.json`: `metrics` and `devices` of a finished run, `error` of another.

    `peaks` says where each device that computes is fullest and what lies there, `schedule` is of a
    run that simulated one, `measured` of one that was carried out.

    A finished run has an `error` if it could not be recorded. `key` is the identity of the job, by
    which a sweep knows it again, and `files_read` what its model read: see `runner.job.files_read`.

    Raises `CacheError` when the place cannot be written.
    """
    document = {
        "schema": RESULT,
        "version": VERSION,
        "status": status,
        "metrics": metrics or {},
        "devices": devices,
        "peaks": peaks,
        "schedule": schedule,
        "measured": measured,
        "config": config,
        "error": error,
        "sweep": sweep_id,
        "key": key,
        "files_read": files_read or {},
    }
    write_json(path, document)


def write_table(path: Path, columns: Mapping[str, Sequence[object]]) -> None:
    """Write columns of equal length as CSV, with their names in the first line.

    Raises `CacheError` when the place cannot be written.
    """
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    write_text(path, text.getvalue())


def read_result(path: Path) -> dict[str, Any]:
    """Return what a `result.json` says, as written.

    Raises `SpecError` when the file is missing, damaged, of another kind, or newer than this code.
    """
    document = read_document(path, RESULT, VERSION)
    needed = ("config", "devices", "error", "metrics", "status")
    absent = [key for key in needed if key not in document]
    if absent:
        raise SpecError(f"{path} is damaged (no {absent[0]}); run it again")
    if not isinstance(document["metrics"], dict):
        raise SpecError(f"{path} is damaged (metrics without names); run it again")
    # Files of earlier versions do not say what was read.
    if not isinstance(document.setdefault("files_read", {}), dict):
        raise SpecError(f"{path} is damaged (files without names); run it again")
    return document
