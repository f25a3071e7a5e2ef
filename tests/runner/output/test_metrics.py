"""The table of metrics, and its uses."""

import json
from collections import Counter
from pathlib import Path

import pytest

from runner.output import metrics
from runner.output.metrics import (
    BY_NAME,
    DERIVED,
    DEVICE_METRICS,
    LAST_SPARE,
    METRICS,
    SERIES,
    Metric,
    PageColumn,
    metrics_page,
    page_columns,
)
from runner.report import ranking
from runner.report.ranking import measures_of, ranked
from runner.report.table import show_sweep
from runner.sweep.optuna.study import Goal, refuse_unknown_metrics
from runner.tracking.mlflow_view import comparison_view
from tests.runner.report.sweeps import row, sweep

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
UNITS = {
    "_j": "J",
    "_ms": "ms",
    "_s": "s",
    "_per_s": "per s",
    "examples_per_s": "examples/s",
    "_gib": "GiB",
    "_pct": "%",
    "price_per_hour": "USD",
    "price_per_million_examples": "USD",
    "price_per_million_tokens": "USD",
}


def test_the_page_is_the_output_of_the_command() -> None:
    assert PAGE.read_text() == metrics_page(), "python -m runner.output.metrics > docs/metrics.md"


def test_rows_are_complete() -> None:
    rows = (*METRICS, *DERIVED, *SERIES)
    assert len({metric.name for metric in rows}) == len(rows) == len(BY_NAME)
    for metric in rows:
        name = metric.name.removesuffix("_low").removesuffix("_high")
        ends = [end for end in UNITS if name.endswith(end)]
        assert metric.unit == (UNITS[max(ends, key=len)] if ends else ""), metric.name
        assert metric.sentence.endswith((".", "number.")), metric.name
        assert format(1.5, metric.format), metric.name
        assert bool(metric.column) <= bool(metric.heading), metric.name
        assert 0 <= metric.spare <= LAST_SPARE, metric.name
    for column in DEVICE_METRICS:
        ends = [end for end in UNITS if column.name.endswith(end)]
        assert column.unit == (UNITS[max(ends, key=len)] if ends else ""), column.name
    places = Counter(metric.page.place for metric in METRICS if metric.page)
    assert set(places.values()) == {1}


def test_mlflows_page_has_its_columns_in_order() -> None:
    view = json.loads(json.loads(comparison_view(None, "all", 0))["state"])
    shown = [key for key in view["columnOrder"] if key.startswith("metrics.")]
    common, others = page_columns(common=True), page_columns(common=False)
    assert shown == [f"metrics.`{name}`" for name in (*common, *others)]
    assert list(common)[:3] == ["latency_ms", "peak_memory_gib", "partitions"]
    assert {key: view["columnWidths"][key] for key in shown} == {
        f"metrics.`{name}`": width for name, width in {**common, **others}.items()
    }


def test_a_new_metric_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In reports, in the terminal, for searches, on MLflow's page and in the docs."""
    new = Metric(
        *("joules", "J", ".1f", "lower", "Energy of one input."),
        heading="energy",
        column="some",
        page=PageColumn(19, 90),
    )
    for module in (metrics, ranking):
        monkeypatch.setattr(module, "METRICS", (*METRICS, new))
    monkeypatch.setattr("runner.sweep.optuna.study.METRICS", (*METRICS, new))
    monkeypatch.setenv("COLUMNS", "100")
    rows = [row(1.0, mode="a", metrics={"joules": 2.25}), row(2.0, mode="b")]
    assert [m.label for m in measures_of(rows)][-1] == "energy, J"
    show_sweep(sweep(rows, "mode"), None)
    assert {"energy", "J", "2.2", "-"} <= set(capsys.readouterr().out.split())
    refuse_unknown_metrics([Goal("joules", "minimize")])
    assert list(page_columns(common=True))[-1] == "joules"
    assert "| `joules` | J | lower |  | Energy of one input. |" in metrics_page()


def test_ranking_follows_the_direction_of_each_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(1.0, mode="slow"), row(2.0, mode="fast"), row(2.0, mode="also")]
    assert ranked(sweep(rows, "mode")).finished[0].row.settings["mode"] == "slow"
    higher = {**BY_NAME, "latency_ms": Metric("latency_ms", "ms", ".1f", "higher", "The reverse.")}
    monkeypatch.setattr(ranking, "BY_NAME", higher)
    finished = ranked(sweep(rows, "mode")).finished
    assert [r.row.settings["mode"] for r in finished] == ["also", "fast", "slow"]
    assert [(r.best, r.pareto) for r in finished] == [(True, True), (True, True), (False, False)]
