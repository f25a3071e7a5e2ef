"""The file `result.json` of a run, which names its schema and version, and CSV tables."""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.errors import SpecError
from fxpart.schedule import ScheduleResult
from fxpart.support.json_file import read_document
from fxpart.support.text_files import write_json, write_text

__all__ = [
    "SETTLED",
    "Status",
    "device_rows",
    "read_result",
    "schedule_document",
    "write_result",
    "write_table",
]

RESULT = "fxpart.result"
VERSION = 1

Status = Literal["finished", "infeasible", "not_applicable", "failed"]
SETTLED: tuple[Status, ...] = ("finished", "infeasible", "not_applicable")
"""Final statuses: running the job again would not change them."""


def device_rows(evaluation: Evaluation) -> list[dict[str, object]]:
    """Return a row of plain values for each device, idle ones included."""
    return [
        {
            **{name: getattr(use, name) for name in DeviceUse.__slots__},
            "total_bytes": use.total_bytes,
            "free_bytes": use.free_bytes,
        }
        for use in evaluation.devices
    ]


def schedule_document(result: ScheduleResult) -> dict[str, object]:
    """Return the result of a schedule as plain values, with a row for each device in use."""
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


_EMPTY: Mapping[str, object] = {
    "metrics": {},  # by name
    "devices": [],  # see `device_rows`
    "peaks": [],  # the memory peak of each computing device, with its tensors
    "device_memory": [],  # the memory needed on each device, by part
    "schedule": None,
    "measured": None,  # of an executed plan
    "error": None,  # why there is no result, or why a finished run could not be recorded
    "sweep": None,  # the id of the sweep that ran it
    "key": None,  # of the job, by which a sweep recognises it
}
"""Defaults of the parts of `result.json`."""


def write_result(
    path: Path, *, status: Status, config: Mapping[str, object], **parts: object
) -> None:
    """Write `result.json`; `config` describes the run, and `parts` are any of those in `_EMPTY`.

    Raises `CacheError` if it cannot be written.
    """
    assert parts.keys() <= _EMPTY.keys(), "no other part is read"
    named = {"schema": RESULT, "version": VERSION, "status": status, "config": config}
    write_json(path, {**_EMPTY, **parts, **named})


def write_table(path: Path, columns: Mapping[str, Sequence[object]]) -> None:
    """Write columns of equal length as CSV, with their names in the first line.

    Raises `CacheError` if it cannot be written.
    """
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    write_text(path, text.getvalue())


def read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`.

    Raises `SpecError` if the file is missing, damaged, of another kind, or newer than this code.
    """
    document = read_document(path, RESULT, VERSION)
    needed = ("config", "devices", "error", "metrics", "status")
    absent = [key for key in needed if key not in document]
    if absent:
        raise SpecError(f"{path} is damaged (no {absent[0]}); run it again")
    if not isinstance(document["metrics"], dict):
        raise SpecError(f"{path} is damaged (metrics without names); run it again")
    return document
