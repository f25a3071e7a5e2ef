"""The order of a sweep's jobs, the values shown, and the Pareto frontier."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.report.ranking import frontier, ranked
from runner.report.sweep_data import SweepRow, headings, varied
from tests.runner.report.sweeps import row, sweep, unfit


def test_the_best_comes_first_and_equal_jobs_are_best_together() -> None:
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
        ({"partitions": 1.0, "transfer_gib": 1e6}, False),
    ],
)
def test_time_memory_and_devices_make_the_frontier(metrics: dict[str, float], pareto: bool) -> None:
    ranking = ranked(sweep([row(1.0), row(2.0, metrics=metrics)]))
    assert [r.pareto for r in ranking.finished] == [True, pareto]


def test_schedules_are_ranked_by_time_per_example() -> None:
    """A step of fewer microbatches may be shorter without being better."""
    short = {"step_ms": 20.0, "examples_per_s": 200.0, "schedule_peak_gib": 3.5}
    long = {"step_ms": 32.0, "examples_per_s": 250.0, "schedule_peak_gib": 3.5}
    ranking = ranked(sweep([row(metrics=short, mode="s"), row(metrics=long, mode="l")], "mode"))
    assert (ranking.by.key, ranking.memory.key) == ("example_ms", "schedule_peak_gib")
    times = [(r.row.settings["mode"], ranking.by.text(r.row)) for r in ranking.finished]
    assert times == [("l", "4.000"), ("s", "5.000")]
    plain = {"examples_per_s": 400.0, "peak_memory_gib": 1.0}
    mixed = ranked(sweep([row(metrics=short), row(2.0, metrics=plain)]))
    assert mixed.by.key == "example_ms"
    # Memory is that of the whole step, where there is one.
    assert [mixed.memory.text(r.row) for r in mixed.finished] == ["1.000", "3.500"]
    assert not {"latency_ms", "optimality_gap_pct"} & {m.key for m in mixed.measures}


def test_schedules_are_compared_at_equal_effective_batch() -> None:
    """A step of 8 examples is ranked among those of 8, however they are divided."""

    def job(rate: float, schedule: str, batch: str, count: str) -> SweepRow:
        metrics = {"step_ms": 1.0, "examples_per_s": rate, "schedule_peak_gib": 1.0}
        if schedule == "none":
            return row(metrics={"examples_per_s": rate}, model__batch_size=batch)
        return row(metrics=metrics, model__batch_size=batch, schedule=schedule, microbatches=count)

    rows = [
        job(50.0, "none", "8", "1"),
        job(90.0, "1f1b", "1", "8"),
        job(80.0, "gpipe", "2", "4"),
        job(200.0, "1f1b", "4", "8"),
    ]
    ranking = ranked(sweep(rows, "schedule", "model.batch_size", "microbatches"))
    assert ranking.models == ("effective batch 8", "effective batch 32")
    eight = [r.row.settings["schedule"] for r in ranking.of_model("effective batch 8") if r.leads]
    assert eight == ["1f1b"]
    # Where one schedule is to have its best size, sizes are compared.
    alike = [job(rate, "1f1b", "1", count) for rate, count in ((50.0, "4"), (90.0, "16"))]
    assert len(ranked(sweep(alike, "microbatches")).models) == 1


def test_a_step_without_time_has_a_time_per_example() -> None:
    """Its rate is infinite, and no store keeps infinity."""
    ranking = ranked(sweep([row(0.0, metrics={"step_ms": 0.0, "schedule_peak_gib": 1.0})]))
    assert (ranking.by.key, ranking.by.value(ranking.finished[0].row)) == ("example_ms", 0.0)


def test_small_numbers_get_a_small_unit() -> None:
    tiny = {"peak_memory_gib": 2.0**-16}
    ranking = ranked(sweep([row(0.002, metrics=tiny), row(0.09, metrics=tiny)]))
    assert (ranking.by.text(ranking.finished[0].row), ranking.by.unit) == ("2.000", "us")
    assert (ranking.memory.text(ranking.finished[0].row), ranking.memory.unit) == ("16.000", "KiB")
    assert ranked(sweep([row(0.002), row(0.2)])).by.unit == "ms"


def test_varying_settings_are_shown_swept_ones_first() -> None:
    rows = [
        row(mode=mode, model__batch_size=size, mode__depth=depth, model__seq_len="8")
        for mode, depth in (("a", "1"), ("b", "2"))
        for size in ("1", "64")
    ]
    # The option of a mode follows from the mode.
    assert varied(sweep(rows, "model.batch_size", "mode")) == ("mode", "model.batch_size")
    assert varied(sweep(rows)) == ("mode", "model.batch_size")
    rows_by_depth = [row(mode__depth=depth) for depth in ("1", "2")]
    assert varied(sweep(rows_by_depth, "mode.depth")) == ("mode.depth",)


def test_settings_with_the_same_meaning_are_shown_once() -> None:
    rows = [row(model=name, model__factory=name) for name in ("x:f", "y:g")]
    assert varied(sweep(rows, "model.factory")) == ("model",)


def test_settings_of_several_commands_that_differ_together_have_a_column_each() -> None:
    rows = [
        row(3.0, transfer_rate="pcie3", runtime="graph", model__config__n="1", model="a"),
        row(6.0, transfer_rate="pcie5", runtime="eager", model__config__n="2", model="b"),
    ]
    data = sweep(rows, "model", "transfer_rate")
    assert varied(data) == ("model", "transfer_rate")
    shown = varied(replace(data, of_several=True))
    assert shown == ("model", "transfer_rate", "runtime")


def test_headings_are_short_unless_two_end_alike() -> None:
    keys = ("mode", "model.batch_size", "mode.layers", "model.config.layers")
    assert list(headings(keys).values()) == [
        "mode",
        "batch size",
        "mode.layers",
        "model.config.layers",
    ]


def test_generations_of_one_size_are_ranked_by_all_their_tokens() -> None:
    """Their latency is of the last token, whatever the first took."""
    late = {"tokens_per_s": 100.0, "tpot_ms": 1.0, "ttft_ms": 900.0}
    soon = {"tokens_per_s": 200.0, "tpot_ms": 2.0, "ttft_ms": 10.0}
    rows = [row(1.0, mode="a", metrics=late), row(2.0, mode="b", metrics=soon)]
    ranking = ranked(sweep(rows, "mode"))
    assert ranking.by.key == "token_ms"
    assert [entry.row for entry in ranking.finished] == rows[::-1]
    decodes = [
        replace(r, metrics={k: v for k, v in r.metrics.items() if k != "ttft_ms"}) for r in rows
    ]
    assert ranked(sweep(decodes, "mode")).by.key == "latency_ms"


def test_generations_of_several_lengths_are_ranked_by_time_per_token() -> None:
    """A longer text takes longer, although its tokens may come faster."""
    short = {"examples_per_s": 10.0, "tokens_per_s": 1280.0, "tpot_ms": 5.0}
    long = {"examples_per_s": 2.0, "tokens_per_s": 2048.0, "tpot_ms": 4.0}
    rows = [row(5.0, metrics=short, output_len="128"), row(4.0, metrics=long, output_len="1024")]
    ranking = ranked(sweep(rows))
    assert ranking.by.key == "token_ms"
    assert [entry.row for entry in ranking.finished] == rows[::-1]
    # Passes over inputs have tokens too, but none that are generated one after the other.
    del short["tpot_ms"], long["tpot_ms"]
    passes = [row(5.0, metrics=short, output_len="128"), row(4.0, metrics=long, output_len="1024")]
    assert ranked(sweep(passes)).by.key == "example_ms"


def test_batch_sizes_are_ranked_by_time_per_example() -> None:
    small = row(10, metrics={"examples_per_s": 100.0}, model__batch_size="1")
    large = row(40, metrics={"examples_per_s": 200.0}, model__batch_size="8")
    ranking = ranked(sweep([small, large]))
    assert ranking.by.key == "example_ms"
    assert [entry.row for entry in ranking.finished] == [large, small]
    assert [ranking.by.value(entry.row) for entry in ranking.finished] == [5, 10]
    # Values that an older run did not log cannot be compared.
    old = row(5, model__batch_size="2")
    assert ranked(sweep([small, large, old])).by.key == "latency_ms"


def test_settings_that_change_the_model_form_groups_in_numeric_order() -> None:
    rows = [
        row(ms, mode=mode, model__config__n_layer=layers, metrics={"peak_memory_gib": ms})
        for layers, mode, ms in (("12", "a", 30.0), ("12", "b", 20.0), ("2", "a", 5.0))
    ]
    ranking = ranked(sweep(rows, "mode", "model.config.n_layer"))
    assert ranking.keys == ("model.config.n_layer", "mode")
    assert [(r.model, r.best, r.pareto) for r in ranking.finished] == [
        ("n_layer=2", True, True),
        ("n_layer=12", True, True),
        ("n_layer=12", False, False),
    ]


@pytest.mark.parametrize("key", ["model.batch_size", "model.seq_len", "model.dtype"])
def test_settings_that_keep_the_model_form_no_groups(key: str) -> None:
    rows = [
        replace(row(ms), settings={**row().settings, key: text})
        for ms, text in ((1.0, "1"), (2.0, "2"))
    ]
    ranking = ranked(sweep(rows, key))
    assert (ranking.models, ranking.model_keys) == (("gpt2",), ())
    assert [r.best for r in ranking.finished] == [True, False]


def test_models_are_named_by_all_that_differs() -> None:
    rows = [
        row(1.0, model="gpt2", model__config__n_layer="2"),
        row(1.0, model="gpt2", model__config__n_layer="4"),
        row(1.0, model="x:f", model__factory_args__n="3"),
    ]
    assert ranked(sweep(rows)).models == ("gpt2 n_layer=2", "gpt2 n_layer=4", "x:f")
    factories = [row(1.0, model__factory=name) for name in ("x:f", "x:g")]
    assert ranked(sweep(factories)).models == ("factory=x:f", "factory=x:g")


POINTS = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30)


def test_a_frontier_by_hand() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 6.0), (3.0, 5.0), (9.0, 1.0), (1.0, 9.0)]
    assert frontier(points) == [True, True, False, False, True, True]
    assert frontier([]) == []


@given(POINTS)
def test_the_frontier_follows_its_definition(points: list[tuple[int, int, int]]) -> None:
    expected = [
        not any(
            all(o <= m for o, m in zip(other, point, strict=True)) and other != point
            for other in points
        )
        for point in points
    ]
    assert frontier(points) == expected


@pytest.mark.parametrize(
    ("objective", "key", "gap", "against"),
    [
        ("throughput", "load_ms", "load_gap_pct", "peak_memory_gib"),
        ("energy", "energy_j", "energy_gap_pct", "peak_memory_gib"),
        ("memory", "peak_memory_gib", "memory_gap_pct", "latency_ms"),
    ],
)
def test_jobs_with_one_objective_are_ranked_by_it(
    objective: str, key: str, gap: str, against: str
) -> None:
    fast, good = {key: 9.0, gap: 5.0}, {key: 7.0, gap: 2.0}
    rows = [row(1.0, metrics=fast, mode="fast"), row(2.0, metrics=good, mode="good")]
    jobs = [replace(r, settings={**r.settings, "objective": objective}) for r in rows]
    ranking = ranked(sweep(jobs, "mode"))
    assert [r.row.settings["mode"] for r in ranking.finished] == ["good", "fast"]
    assert [m.key for m in ranking.measures[:2]] == [key, gap]
    assert [m.name for m in ranking.measures].count("gap") == 1
    assert ranking.against.key == against
    assert ranking.finished[1].pareto is (against == "latency_ms")
    # Jobs with several objectives are ranked by latency.
    assert ranked(sweep([jobs[0], rows[1]], "objective")).by.key == "latency_ms"


def test_a_stream_of_several_sizes_is_ranked_by_time_per_example() -> None:
    jobs = [
        row(
            metrics={"load_ms": load, "examples_per_s": rate},
            model__batch_size=size,
            objective="throughput",
        )
        for load, rate, size in ((1.0, 1000.0, "1"), (2.0, 4000.0, "8"))
    ]
    ranking = ranked(sweep(jobs, "model.batch_size"))
    assert (ranking.by.key, ranking.by.text(ranking.finished[0].row)) == ("example_ms", "0.250")
