"""The final table of a sweep: which run is the fastest, and how the runs differ."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpart.errors import SpecError
from runner.identity import override_values
from runner.terminal import add_numbers, counted, empty_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SETTINGS", "sweep_reasons", "sweep_row", "sweep_table"]

SETTINGS = ("model", "mode", "devices", "transfer_rate")

_METRICS = (
    "latency_ms",
    "peak_memory_gib",
    "throughput_per_s",
    "replicas",
    "step_ms",
    "bubble_pct",
    "schedule_peak_gib",
    "measured_ms",
    "time_error_pct",
)
"""Taken as they are."""
_MEASURES = (*_METRICS, "microbatch_ms", "partitions", "gap", "feasible", "reason")


_HYPHENATED = {"microbatches": "micro-\nbatches"}
"""Headings that are wider than what stands below them, and would be cut anywhere."""


class _Column(NamedTuple):
    """A measure of a row, as it is shown."""

    heading: str
    key: str
    form: str
    scale: float = 1.0

    def cell(self, row: Mapping[str, object]) -> str:
        value = row.get(self.key)
        return f"{value * self.scale:{self.form}}" if isinstance(value, int | float) else "-"


_PARTS = _Column("parts", "partitions", ".0f")
_PLAIN = (
    _Column("latency\nms", "latency_ms", ",.3f"),
    _Column("gap\n%", "gap", ".1f", 100),
    _Column("peak\nGiB", "peak_memory_gib", ".3f"),
)
_SERVED = _Column("inputs\nper s", "throughput_per_s", ",.2f")
_SCHEDULED = (
    _Column("ms per\nmicro-\nbatch", "microbatch_ms", ",.3f"),
    _Column("step\nms", "step_ms", ",.3f"),
    _Column("bubble\n%", "bubble_pct", ".1f"),
    _Column("peak\nGiB", "schedule_peak_gib", ".3f"),
)
_MEASURED = (
    _Column("measured\nms", "measured_ms", ",.3f"),
    _Column("error\n%", "time_error_pct", "+.1f"),
)


def sweep_row(result: Mapping[str, Any]) -> dict[str, object]:
    """Return the row of a job by its `result.json`.

    Raises `SpecError` when the file does not say what the job was.
    """
    try:
        choices, overrides = result["config"]["choices"], result["config"]["overrides"]
        metrics, status = dict(result["metrics"]), str(result["status"])
        settings: dict[str, object] = {**override_values(overrides), **choices}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError("no settings or metrics in it; run it again") from error
    gap, partitions = metrics.get("optimality_gap_pct"), metrics.get("partitions")
    return {
        **settings,
        **{key: metrics.get(key) for key in _METRICS},
        "microbatch_ms": _microbatch_ms(metrics),
        "partitions": None if partitions is None else int(partitions),
        "gap": None if gap is None else gap / 100,
        "feasible": {"finished": True, "infeasible": False}.get(status),
        "reason": result["error"],
    }


def _microbatch_ms(metrics: Mapping[str, Any]) -> float | None:
    """Return the time of a step by microbatch, None without a schedule."""
    if metrics.get("step_ms") is None:
        return None
    # What takes no time has no finite rate, and the file does not say an infinite one.
    rate = metrics.get("microbatches_per_s")
    return 1e3 / rate if rate else 0.0


def _columns(rows: Sequence[Mapping[str, object]]) -> list[_Column]:
    """Return the measures to show of `rows`; they are ranked by the first."""
    finished = [row for row in rows if _finished(row)]
    if finished and all(_is_number(row, "microbatch_ms") for row in finished):
        columns = [*_SCHEDULED, _PARTS]
    else:
        served = any(row.get("replicas") and _number(row, "replicas") > 1 for row in rows)
        columns = [*_PLAIN, *([_SERVED] if served else []), _PARTS]
    measured = any(_is_number(row, "measured_ms") for row in finished)
    return [*columns, *(_MEASURED if measured else [])]


def _varied(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys to show: the mode, and all overrides and choices that rows differ in.

    Left out is an override that says the same as a choice: the factory that a model is named after.
    """
    shown: dict[str, list[str]] = {}
    for key in dict.fromkeys([*SETTINGS, *(key for row in rows for key in row)]):
        cells = [str(row.get(key, "-")) for row in rows]
        if key in _MEASURES or (key != "mode" and len(set(cells)) < 2):
            continue
        if key in SETTINGS or cells not in shown.values():
            shown[key] = cells
    return list(shown)


def _headings(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or all of it where another ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    names = (name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True))
    spaced = ((key, name.replace("_", " ")) for key, name in zip(keys, names, strict=True))
    return {key: _HYPHENATED.get(name, name) for key, name in spaced}


def sweep_table(rows: Sequence[Mapping[str, object]]) -> "Table":
    """Return the runs of a sweep, fastest first for each model, those without a result last.

    A row has ``mode``, ``devices``, ``transfer_rate``, ``model``, overrides by their keys, and
    ``latency_ms``, ``peak_memory_gib``, ``partitions``, ``gap`` (0.1 is 10 % above the lower bound)
    and ``feasible``; a missing number shows as ``-``. A choice that all rows share is in the title.
    The best of each model, equals included, has a ``*``. Where a row has replicas, which serve more
    inputs at the same latency, all show their inputs per second. Where all results have a schedule,
    it is by time per microbatch that they are ranked, since their steps may have different numbers
    of them. Where one was measured, all show that. Why a row has no result: `sweep_reasons`.
    """
    varied, columns = _varied(rows), _columns(rows)
    shared = [f"{key}={rows[0].get(key, '-')}" for key in SETTINGS if rows and key not in varied]
    table = empty_table(", ".join([counted(len(rows), "run"), *shared]))
    table.add_column("")
    for heading in _headings(varied).values():
        table.add_column(heading, overflow="fold")
    add_numbers(table, *(column.heading for column in columns))
    by = columns[0].key
    ranked = sorted((row for row in rows if _finished(row)), key=lambda row: _rank(row, by))
    best: dict[str, float] = {}
    for row in ranked:
        best.setdefault(str(row.get("model")), _number(row, by))
    for row in [*ranked, *(row for row in rows if not _finished(row))]:
        leads = _finished(row) and _number(row, by) == best[str(row.get("model"))]
        style = "bold" if leads else "" if _finished(row) else "dim"
        settings = [str(row.get(key, "-")) for key in varied]
        table.add_row("*" if leads else "", *settings, *_measures(row, columns), style=style)
    if ranked:
        least = "lowest latency" if by == "latency_ms" else "least time per microbatch"
        table.caption = f"* {least}" + (" for its model" if len(best) > 1 else "")
    return table


def sweep_reasons(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return one line for each row without a result: its settings and why (``reason``)."""
    keys = dict.fromkeys([*SETTINGS, *_varied(rows)])
    return [
        " ".join(f"{key}={row[key]}" for key in keys if key in row)
        + f": {row.get('reason') or _failure(row)}"
        for row in rows
        if not _finished(row)
    ]


def _finished(row: Mapping[str, object]) -> bool:
    return row.get("feasible") is True and _is_number(row, "latency_ms")


def _failure(row: Mapping[str, object]) -> str:
    return "infeasible" if row.get("feasible") is False else "failed"


def _rank(row: Mapping[str, object], by: str) -> tuple[str, float, str]:
    settings = " ".join(str(row.get(key)) for key in SETTINGS)
    return str(row.get("model")), _number(row, by), settings


def _is_number(row: Mapping[str, object], key: str) -> bool:
    return isinstance(row.get(key), int | float)


def _number(row: Mapping[str, object], key: str) -> float:
    value = row[key]
    return float(value) if isinstance(value, int | float) else float("nan")


def _measures(row: Mapping[str, object], columns: Sequence[_Column]) -> list[str]:
    if _finished(row):
        return [column.cell(row) for column in columns]
    return [_failure(row), *["-"] * (len(columns) - 1)]
