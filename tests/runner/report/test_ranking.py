"""The order of a sweep's jobs, and what is shown of them."""

import pytest

from runner.report.ranking import ranked
from runner.report.settings import headings, varied
from tests.runner.report.sweeps import row, sweep, unfit


def test_the_best_comes_first_and_equals_are_best_together() -> None:
    rows = [row(3.0, mode="a"), row(1.0, mode="b"), unfit(mode="c"), row(1.0, mode="d")]
    ranking = ranked(sweep(rows, "mode"))
    assert [(r.row.settings["mode"], r.best) for r in ranking.finished] == [
        ("b", True),
        ("d", True),
        ("a", False),
    ]
    assert [r.settings["mode"] for r in ranking.others] == ["c"]
    assert ranking.count("infeasible") == 1


def test_each_model_has_its_best_and_its_frontier() -> None:
    rows = [row(5.0, model="x"), row(9.0, model="x"), row(50.0, model="y")]
    ranking = ranked(sweep(rows, "model"))
    assert [(r.model, r.best, r.pareto) for r in ranking.finished] == [
        ("x", True, True),
        ("x", False, False),
        ("y", True, True),
    ]


@pytest.mark.parametrize(
    ("metrics", "pareto"),
    [
        ({"peak_memory_gib": 1.0}, True),
        ({"devices_used": 1.0}, True),
        ({"partitions": 1.0, "throughput_per_s": 1e6}, False),
    ],
)
def test_time_memory_and_devices_make_the_frontier(metrics: dict[str, float], pareto: bool) -> None:
    ranking = ranked(sweep([row(1.0), row(2.0, metrics=metrics)]))
    assert [r.pareto for r in ranking.finished] == [True, pareto]


def test_schedules_are_ranked_by_time_per_microbatch() -> None:
    """A step of fewer microbatches may be shorter, and is not better for it."""
    short = {"step_ms": 20.0, "microbatches_per_s": 200.0, "schedule_peak_gib": 3.5}
    long = {"step_ms": 32.0, "microbatches_per_s": 250.0, "schedule_peak_gib": 3.5}
    ranking = ranked(sweep([row(metrics=short, mode="s"), row(metrics=long, mode="l")], "mode"))
    assert (ranking.by.key, ranking.memory.key) == ("microbatch_ms", "schedule_peak_gib")
    times = [(r.row.settings["mode"], ranking.by.text(r.row)) for r in ranking.finished]
    assert times == [("l", "4.000"), ("s", "5.000")]
    mixed = ranked(sweep([row(metrics=short), row(2.0)]))
    assert mixed.by.key == "latency_ms"


def test_what_takes_no_time_has_a_time_per_microbatch() -> None:
    """Its rate is infinite, and no store keeps that."""
    ranking = ranked(sweep([row(0.0, metrics={"step_ms": 0.0, "schedule_peak_gib": 1.0})]))
    assert (ranking.by.key, ranking.by.value(ranking.finished[0].row)) == ("microbatch_ms", 0.0)


def test_small_numbers_get_a_small_unit() -> None:
    tiny = {"peak_memory_gib": 2.0**-16}
    ranking = ranked(sweep([row(0.002, metrics=tiny), row(0.09, metrics=tiny)]))
    assert (ranking.by.text(ranking.finished[0].row), ranking.by.unit) == ("2.000", "us")
    assert (ranking.memory.text(ranking.finished[0].row), ranking.memory.unit) == ("16.000", "KiB")
    assert ranked(sweep([row(0.002), row(0.2)])).by.unit == "ms"


def test_what_varies_is_shown_the_swept_first() -> None:
    rows = [
        row(mode=mode, model__batch_size=size, mode__depth=depth, model__seq_len="8")
        for mode, depth in (("a", "1"), ("b", "2"))
        for size in ("1", "64")
    ]
    # The option of a mode follows from the mode.
    assert varied(sweep(rows, "model.batch_size", "mode")) == ("mode", "model.batch_size")
    assert varied(sweep(rows)) == ("mode", "model.batch_size")
    own = [row(mode__depth=depth) for depth in ("1", "2")]
    assert varied(sweep(own, "mode.depth")) == ("mode.depth",)


def test_what_says_the_same_is_shown_once() -> None:
    rows = [row(model=name, model__factory=name) for name in ("x:f", "y:g")]
    assert varied(sweep(rows, "model.factory")) == ("model",)


def test_headings_are_short_unless_two_end_alike() -> None:
    keys = ("mode", "model.batch_size", "mode.layers", "model.config.layers")
    assert list(headings(keys).values()) == [
        "mode",
        "batch size",
        "mode.layers",
        "model.config.layers",
    ]


def test_batch_sizes_are_ranked_by_time_per_example() -> None:
    small = row(10, metrics={"examples_per_s": 100.0}, model__batch_size="1")
    large = row(40, metrics={"examples_per_s": 200.0}, model__batch_size="8")
    ranking = ranked(sweep([small, large]))
    assert ranking.by.key == "example_ms"
    assert [one.row for one in ranking.finished] == [large, small]
    assert [ranking.by.value(one.row) for one in ranking.finished] == [5, 10]
    # What an older run did not log cannot be compared.
    old = row(5, model__batch_size="2")
    assert ranked(sweep([small, large, old])).by.key == "latency_ms"
