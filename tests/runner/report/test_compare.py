"""Two sweeps compared job by job."""

from dataclasses import replace

import pytest

from runner.report.compare import (
    best_lines,
    change_pct,
    change_text,
    compared,
    only_lines,
    title,
    unlike,
    why_none,
)
from runner.report.html import comparison_html, report_html
from runner.report.sweep_data import SweepRow
from runner.report.table import show_comparison
from tests.runner.report.sweeps import row, sweep, unfit
from tests.runner.report.test_html import EVIL, Tags


def of_modes(*times: float, **settings: str) -> list[SweepRow]:
    """Return a job for each time, with modes a, b, c and so on."""
    rows = [row(ms, mode=chr(ord("a") + i)) for i, ms in enumerate(times)]
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return [replace(job, settings={**job.settings, **changed}) for job in rows]


def test_the_largest_change_comes_first_in_either_direction() -> None:
    before = [*of_modes(10.0, 10.0, 10.0), unfit(mode="d"), row(1.0, mode="e"), unfit(mode="f")]
    after = [*of_modes(10.5, 10.0, 8.0), row(3.0, mode="d"), unfit(mode="e"), unfit(mode="f")]
    after[1] = row(10.0, mode="b", metrics={"peak_memory_gib": 3.0})
    comparison = compared(sweep(before, "mode"), sweep(after, "mode"))
    modes = [pair.after.settings["mode"] for pair in comparison.pairs]
    # First what fits in only one sweep, then doubled memory, -20 %, +5 %; then no result.
    assert modes == ["d", "e", "b", "c", "a", "f"]
    times = [change_text(pair, comparison.time) for pair in comparison.pairs]
    assert times == ["-", "-", "0.0", "-20.0", "+5.0", "-"]
    assert [change_text(pair, comparison.memory) for pair in comparison.pairs[2:4]] == [
        "+100.0",
        "0.0",
    ]
    assert (comparison.only_before, comparison.only_after, comparison.differences) == ((), (), ())


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (10.0, 10.001, "+0.01"),
        (10.0, 9.996, "-0.04"),
        (10.0, 10.0051, "+0.1"),
        (0.0, 0.0, "0.0"),
        (0.0, 1.0, "-"),
    ],
)
def test_a_change_is_never_shown_as_none(before: float, after: float, expected: str) -> None:
    comparison = compared(sweep([row(before)]), sweep([row(after)]))
    assert change_text(comparison.pairs[0], comparison.time) == expected


def test_overall_differences_are_noted_and_do_not_keep_jobs_apart() -> None:
    before = of_modes(1.0, 2.0, transfer_rate="pcie3", latency__file="x", latency="roofline")
    after = of_modes(1.0, 2.0, transfer_rate="pcie4", latency="profiled", new="1")
    comparison = compared(sweep(before, "mode"), sweep(after, "mode"))
    assert len(comparison.pairs) == 2
    assert [(d.key, d.before, d.after) for d in comparison.differences] == [
        ("transfer_rate", "pcie3", "pcie4"),
        # Its file follows from it.
        ("latency", "roofline", "profiled"),
        ("new", "not set", "1"),
    ]
    assert title(comparison) == (
        "2 jobs in both, model=gpt2, devices=2x80gb, transfer_rate=pcie3 before and pcie4 after,"
        " latency=roofline before and profiled after, new=not set before and 1 after"
    )
    assert comparison.keys == ("mode",)


def test_another_model_is_an_overall_difference() -> None:
    before = of_modes(1.0, 2.0, model="small", model__config__n_layer="2")
    after = of_modes(4.0, 8.0, model="large", model__config__n_layer="8")
    comparison = compared(sweep(before, "mode"), sweep(after, "mode"))
    assert [d.key for d in comparison.differences] == ["model"]
    assert [change_pct(pair, comparison.time) for pair in comparison.pairs] == [300.0, 300.0]
    assert best_lines(comparison) == [
        "best: before mode=a, 1.000 ms, 1.500 GiB; after mode=a, 4.000 ms, 1.500 GiB (+300.0 %)"
    ]


def test_an_option_of_one_mode_differs_for_that_mode() -> None:
    before = [row(1.0, mode="a", mode__depth="1"), row(2.0, mode="b")]
    after = [row(1.5, mode="a", mode__depth="2"), row(2.0, mode="b")]
    comparison = compared(sweep(before, "mode"), sweep(after, "mode"))
    assert [change_pct(pair, comparison.time) for pair in comparison.pairs] == [50.0, 0.0]


def test_an_additional_value_is_in_one_sweep_alone() -> None:
    before = [row(1.0, mode="a"), row(2.0, mode="b"), unfit(mode="c")]
    comparison = compared(sweep(before, "mode"), sweep(of_modes(1.0)[:1], "mode"))
    assert [r.settings["mode"] for r in comparison.only_before] == ["b", "c"]
    assert only_lines(comparison) == [
        "only before: mode=b, 2.000 ms",
        "only before: mode=c, infeasible",
    ]
    assert only_lines(comparison, 1)[1] == "only before: 1 more; the report has all"


def test_of_equal_jobs_the_first_is_paired_with_the_first() -> None:
    """Jobs that were run again beside their first run: no other job is paired with them."""
    twice = [row(1.0), row(2.0)]
    comparison = compared(sweep(twice), sweep([row(3.0), row(3.0), row(3.0)]))
    assert sorted(change_pct(pair, comparison.time) or 0 for pair in comparison.pairs) == [
        50.0,
        200.0,
    ]
    assert len(comparison.only_after) == 1


def test_sweeps_without_a_shared_job_give_the_reason() -> None:
    before = [row(1.0, devices=devices) for devices in ("2x16gb", "16x16gb")]
    after = [row(1.0, devices=devices) for devices in ("4x16gb", "8x16gb")]
    comparison = compared(sweep(before, "devices"), sweep(after, "devices"))
    assert [d.key for d in unlike(comparison)] == ["devices"]
    assert why_none(comparison) == (
        "no job is in both: devices=2x16gb,16x16gb before, 4x16gb,8x16gb after"
    )
    assert why_none(comparison) in comparison_html(comparison, "it")


def recommended(ms: float, devices: str, plan: str, **settings: str) -> SweepRow:
    job = row(ms, mode="recommend", devices=devices, plan=plan)
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return replace(job, settings={**job.settings, **changed})


def test_a_plan_chosen_for_a_job_keeps_no_jobs_apart() -> None:
    sharded, pipelined = "single zero=1 data_parallel=2", "pipeline microbatches=32"
    before = [
        recommended(2.0, "2x16gb", pipelined, microbatches="32", plan__mode="pipeline"),
        recommended(1.0, "4x16gb", sharded, zero="1", data_parallel="2", plan__mode="single"),
    ]
    after = [
        recommended(2.0, "2x16gb", pipelined, microbatches="32", plan__mode="pipeline"),
        recommended(
            *(0.5, "4x16gb", pipelined),
            microbatches="32",
            model__batch_size="4",
            mode__interleave="2",
        ),
    ]
    comparison = compared(sweep(before, "devices"), sweep(after, "devices"))
    assert (comparison.only_before, comparison.only_after, comparison.differences) == ((), (), ())
    assert comparison.keys == ("devices", "plan")
    changed, same = (pair.after.settings["plan"] for pair in comparison.pairs)
    assert (changed, same) == (f"{sharded} -> {pipelined}", pipelined)
    # What the command sweeps is no result of a plan.
    other = [replace(job, settings={**job.settings, "microbatches": "8"}) for job in after]
    swept = ("devices", "microbatches")
    assert not compared(sweep(after, *swept), sweep(other, *swept)).only_after
    kept = compared(sweep([*after, *other], *swept), sweep(other, *swept))
    assert kept.only_before == tuple(after)
    asked = [sweep(after, "devices", command=f"runner -m model.batch_size={n}") for n in (8, 16)]
    (difference,) = compared(*asked).differences
    assert (difference.key, difference.before, difference.after) == ("model.batch_size", "8", "16")
    objectives = [
        sweep([replace(j, settings={**j.settings, "mode.objective": text}) for j in after])
        for text in ("latency", "throughput")
    ]
    (difference,) = compared(*objectives).differences
    assert (difference.key, difference.after) == ("mode.objective", "throughput")
    elsewhere = [recommended(1.0, "8x16gb", sharded)]
    apart = compared(sweep(before, "devices"), sweep(elsewhere, "devices"))
    assert [difference.key for difference in unlike(apart)] == ["devices"]


def test_one_run_of_both_sweeps_is_noted() -> None:
    jobs = [row(1.0, run_id="r1", mode="a"), row(2.0, run_id="r2", mode="b")]
    again = [jobs[0], replace(jobs[1], run_id="r3")]
    assert compared(sweep(jobs), sweep(again)).same_runs == 1


def test_the_best_of_each_model() -> None:
    before = [row(float(n), model__config__n_layer=str(n), mode=m) for n in (2, 12) for m in "ab"]
    after = [replace(job, metrics={**job.metrics, "latency_ms": 3.0}) for job in before]
    comparison = compared(sweep(before), sweep(after))
    assert best_lines(comparison) == [
        "best of n_layer=2: before mode=a, 2.000 ms, 1.500 GiB;"
        " after mode=a, 3.000 ms, 1.500 GiB (+50.0 %)",
        "best of n_layer=12: before mode=a, 12.000 ms, 1.500 GiB;"
        " after mode=a, 3.000 ms, 1.500 GiB (-75.0 %)",
    ]


@pytest.mark.parametrize("columns", [68, 80])
def test_a_narrow_terminal_shows_the_changes(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    many = [
        row(1234.5, mode=mode, devices=devices)
        for mode in ("communication_aware", "kl_based")
        for devices in ("2x16gb+2x24gb", "4x24gb")
    ]
    show_comparison(compared(sweep(many), sweep(many)), 3)
    output = capsys.readouterr().out
    table = [line for line in output.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= columns
    assert ("…" in "".join(table)) is (columns == 68)
    words = set(" ".join(table).split())
    assert {"1,234.500", "0.0", "change"} <= words
    assert ("communication_aware" in words) is (columns == 80)
    assert "not shown: 1 that change less; --rows 4 shows all" in output


def test_the_section_is_part_of_a_page_and_names_are_no_markup() -> None:
    before = [row(1.0, mode=EVIL), row(2.0, mode="b"), row(2.0, mode=f"{EVIL}2")]
    after = [row(2.0, mode=EVIL), row(1.0, mode="b")]
    comparison = compared(sweep(before, "mode"), sweep(after, "mode"))
    page = report_html(comparison.after, first=comparison_html(comparison, EVIL))
    tags = Tags(page)
    assert tags.names.count("script") == 1
    assert tags.names.count("table") == 2
    assert 'class="n worse" data-v="100">+100.0' in page
    assert 'class="n better" data-v="-50">-50.0' in page
