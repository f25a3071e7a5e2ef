"""The final table of a sweep: which run is the fastest, and how the runs differ."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from runner.identity import override_values
from runner.terminal import add_numbers, counted, empty_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SETTINGS", "sweep_reasons", "sweep_row", "sweep_table"]

SETTINGS = ("model", "mode", "devices", "transfer_rate")


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
        "latency_ms": metrics.get("latency_ms"),
        "peak_memory_gib": metrics.get("peak_memory_gib"),
        "throughput_per_s": metrics.get("throughput_per_s"),
        "replicas": metrics.get("replicas"),
        "partitions": None if partitions is None else int(partitions),
        "gap": None if gap is None else gap / 100,
        "feasible": {"finished": True, "infeasible": False}.get(status),
        "reason": result["error"],
    }


_MEASURES = (
    "latency_ms",
    "peak_memory_gib",
    "throughput_per_s",
    "replicas",
    "partitions",
    "gap",
    "feasible",
    "reason",
)


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
    return {key: name.replace("_", " ") for key, name in zip(keys, names, strict=True)}


def sweep_table(rows: Sequence[Mapping[str, object]]) -> "Table":
    """Return the runs of a sweep, fastest first for each model, those without a result last.

    A row has ``mode``, ``devices``, ``transfer_rate``, ``model``, overrides by their keys, and
    ``latency_ms``, ``peak_memory_gib``, ``partitions``, ``gap`` (0.1 is 10 % above the lower bound)
    and ``feasible``; a missing number shows as ``-``. A choice that all rows share is in the title.
    The best of each model, equals included, has a ``*``. Where a row has replicas, which serve more
    inputs at the same latency, all show their inputs per second. Why a row has no result:
    `sweep_reasons`.
    """
    varied = _varied(rows)
    shared = [f"{key}={rows[0].get(key, '-')}" for key in SETTINGS if rows and key not in varied]
    table = empty_table(", ".join([counted(len(rows), "run"), *shared]))
    table.add_column("")
    for heading in _headings(varied).values():
        table.add_column(heading, overflow="fold")
    served = any(row.get("replicas") and _number(row, "replicas") > 1 for row in rows)
    rate = ["inputs\nper s"] if served else []
    add_numbers(table, "latency\nms", "gap\n%", "peak\nGiB", *rate, "parts")
    ranked = sorted((row for row in rows if _finished(row)), key=_rank)
    best: dict[str, float] = {}
    for row in ranked:
        best.setdefault(str(row.get("model")), _number(row, "latency_ms"))
    for row in [*ranked, *(row for row in rows if not _finished(row))]:
        leads = _finished(row) and _number(row, "latency_ms") == best[str(row.get("model"))]
        style = "bold" if leads else "" if _finished(row) else "dim"
        settings = [str(row.get(key, "-")) for key in varied]
        table.add_row("*" if leads else "", *settings, *_measures(row, served), style=style)
    if ranked:
        table.caption = "* lowest latency" + (" for its model" if len(best) > 1 else "")
    return table


def sweep_reasons(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return one line for each row without a result: its settings and why (``reason``)."""
    keys = dict.fromkeys([*SETTINGS, *_varied(rows)])
    return [
        " ".join(f"{key}={row[key]}" for key in keys if key in row)
        + f": {row.get('reason') or _measures(row)[0]}"
        for row in rows
        if not _finished(row)
    ]


def _finished(row: Mapping[str, object]) -> bool:
    return row.get("feasible") is True and isinstance(row.get("latency_ms"), int | float)


def _rank(row: Mapping[str, object]) -> tuple[str, float, str]:
    settings = " ".join(str(row.get(key)) for key in SETTINGS)
    return str(row.get("model")), _number(row, "latency_ms"), settings


def _number(row: Mapping[str, object], key: str) -> float:
    value = row[key]
    return float(value) if isinstance(value, int | float) else float("nan")


def _measures(row: Mapping[str, object], served: bool = False) -> list[str]:
    if not _finished(row):
        status = "infeasible" if row.get("feasible") is False else "failed"
        return [status, *["-"] * (4 if served else 3)]
    gap, peak, partitions = (row.get(key) for key in ("gap", "peak_memory_gib", "partitions"))
    return [
        f"{_number(row, 'latency_ms'):,.3f}",
        f"{gap * 100:.1f}" if isinstance(gap, int | float) else "-",
        f"{peak:.3f}" if isinstance(peak, int | float) else "-",
        *([f"{_number(row, 'throughput_per_s'):,.2f}"] if served else []),
        "-" if partitions is None else str(partitions),
    ]
