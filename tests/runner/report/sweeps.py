"""Sweeps to report on, written by hand."""

from collections.abc import Sequence

from runner.report.sweep_data import SweepData, SweepRow

SETTINGS = {"model": "gpt2", "mode": "kl_based", "devices": "2x80gb", "transfer_rate": "pcie4"}
METRICS = {
    "latency_ms": 10.0,
    "peak_memory_gib": 1.5,
    "partitions": 4.0,
    "optimality_gap_pct": 25.0,
    "devices_used": 2.0,
}


def row(
    latency_ms: float | None = None,
    status: str = "finished",
    error: str | None = None,
    run_id: str | None = None,
    metrics: dict[str, float] | None = None,
    **settings: str,
) -> SweepRow:
    """Return a job; in `settings`, ``__`` stands for a dot."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    done = status == "finished"
    logged = {**METRICS, **(metrics or {})} if done else {}
    if latency_ms is not None:
        logged["latency_ms"] = latency_ms
    return SweepRow("a job", {**SETTINGS, **changed}, logged, status, error, run_id, None)


def unfit(error: str = "too large", **settings: str) -> SweepRow:
    """Return a job that does not fit."""
    return row(None, "infeasible", error, None, None, **settings)


def sweep(
    rows: Sequence[SweepRow],
    *swept: str,
    title: str = "a sweep",
    question: str = "",
    command: str | None = None,
) -> SweepData:
    return SweepData(title, question, swept, tuple(rows), None, command)
