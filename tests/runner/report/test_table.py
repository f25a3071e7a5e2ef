"""The ranked table in the terminal."""

from dataclasses import replace
from typing import TypeAlias

import pytest

from runner.report.ranking import best_rows, ranked
from runner.report.sweep_data import SweepData, shortened
from runner.report.table import show_sweep
from tests.runner.report.sweeps import row, sweep, unfit

Patch: TypeAlias = pytest.MonkeyPatch
Capture: TypeAlias = pytest.CaptureFixture[str]


def lines_of(
    data: SweepData,
    columns: int,
    monkeypatch: Patch,
    capsys: Capture,
    most: int | None = None,
    *,
    cut: bool = False,
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    show_sweep(data, most)
    text = capsys.readouterr().out
    assert ("…" in text) is cut
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    lines = [line for line in text.splitlines() if line.strip()]
    table = [line for line in lines if line.startswith(" ")]
    assert max(map(len, table), default=0) <= columns
    return lines


def test_the_plan_chosen_by_a_recommendation_has_a_column(
    monkeypatch: Patch, capsys: Capture
) -> None:
    rows = [
        row(12.5, mode="recommend", devices="1x80gb", plan="single"),
        row(6.5, mode="recommend", devices="2x80gb", plan="single data_parallel=2"),
    ]
    lines = lines_of(sweep(rows, "devices"), 80, monkeypatch, capsys)
    # It follows from the devices, but no reader knows how.
    assert lines[2].split()[:2] == ["devices", "plan"]
    assert lines[4].split()[:4] == ["*", "2x80gb", "single", "data_parallel=2"]
    alike = [replace(of, settings={**of.settings, "plan": "single"}) for of in rows]
    assert lines_of(sweep(alike, "devices"), 80, monkeypatch, capsys)[0].endswith("plan=single")


def test_a_sweep_is_ranked_with_jobs_without_a_result_last(
    monkeypatch: Patch, capsys: Capture
) -> None:
    rows = [
        unfit(mode="single"),
        row(12.5, mode="size_based"),
        row(1012.25, mode="cost_aware"),
        row(12.25, mode="optimal"),
        row(12.25, mode="kl_based", devices="6x24gb"),
        row(status="failed", mode="aot_based"),
        row(status="running", mode="pipeline"),
    ]
    lines = lines_of(sweep(rows, "mode", "devices"), 80, monkeypatch, capsys)
    assert lines[0] == "7 runs, 1 under way, model=gpt2, transfer_rate=pcie4"
    assert " ".join(lines[1].split()) == "latency gap peak"
    assert lines[2].split() == ["mode", "devices", "ms", "%", "GiB", "parts"]
    assert [line.split() for line in lines[4:11]] == [
        ["*", "kl_based", "6x24gb", "12.250", "25.0", "1.500", "4"],
        ["=", "optimal", "2x80gb", "12.250", "25.0", "1.500", "4"],
        ["size_based", "2x80gb", "12.500", "25.0", "1.500", "4"],
        ["cost_aware", "2x80gb", "1,012.250", "25.0", "1.500", "4"],
        ["single", "2x80gb", "infeasible", *"---"],
        ["aot_based", "2x80gb", "failed", *"---"],
        ["pipeline", "2x80gb", "running", *"---"],
    ]
    assert lines[11:] == [
        "* lowest latency",
        "= costs the same as one above",
        "mode=single devices=2x80gb: too large",
        "mode=aot_based devices=2x80gb: failed",
    ]


def test_jobs_that_no_other_dominates_are_marked(monkeypatch: Patch, capsys: Capture) -> None:
    rows = [row(1.0, mode="a"), row(3.0, mode="b")]
    rows += [row(2.0, mode="c", metrics={"devices_used": 1.0})]
    lines = lines_of(sweep(rows, "mode"), 80, monkeypatch, capsys)
    assert [line.split()[:2] for line in lines[4:7]] == [["*", "a"], ["+", "c"], ["b", "3.000"]]
    assert lines[-1] == "+ Pareto-optimal in time, peak and devices used"


def test_of_equal_jobs_the_first_is_marked_and_uses_the_fewest_devices(
    monkeypatch: Patch, capsys: Capture
) -> None:
    two = {"devices_used": 2.0, "peak_memory_gib": 1.0}
    rows = [
        row(1.0, mode="a", metrics={**two, "peak_memory_gib": 2.0}),
        row(1.0, mode="b", metrics=two),
        row(1.0, mode="c", metrics={"devices_used": 1.0, "peak_memory_gib": 2.0}),
        row(1.0, mode="d", metrics=two),
        row(1.0, mode="e", metrics={"devices_used": 1.0, "peak_memory_gib": 2.0}),
    ]
    lines = lines_of(sweep(rows, "mode"), 80, monkeypatch, capsys)
    # `a` is as fast, and `b` needs less memory for it.
    assert [line.split()[:2] for line in lines[4:9]] == [
        ["*", "c"],
        ["=", "e"],
        ["+", "b"],
        ["=", "d"],
        ["a", "1.000"],
    ]
    assert lines[-1] == "= costs the same as one above"
    assert lines[2].split()[-2:] == ["used", "parts"]


def test_each_model_has_its_best(monkeypatch: Patch, capsys: Capture) -> None:
    rows = [row(5.0, mode="a"), row(3.0, mode="b"), row(50.0, model="llama"), row(60.0, model="x")]
    lines = lines_of(sweep(rows, "model"), 100, monkeypatch, capsys)
    starred = [line.split()[1:3] for line in lines[:-1] if line.split()[0] == "*"]
    assert starred == [["gpt2", "b"], ["llama", "kl_based"], ["x", "kl_based"]]
    assert lines[-1] == "* lowest latency for its model"


def test_nothing_and_failures(monkeypatch: Patch, capsys: Capture) -> None:
    assert lines_of(sweep([]), 80, monkeypatch, capsys)[0] == "0 runs"
    assert "infeasible" in lines_of(sweep([unfit()]), 80, monkeypatch, capsys)[-2]


@pytest.mark.parametrize(
    ("most", "kept", "note"),
    [
        (6, ["x"] * 2 + ["y"] * 2 + ["z"], "not shown: 5 that rank below; -v shows all"),
        (
            5,
            ["x"] * 2 + ["y"] * 2 + ["z"],
            "not shown: 5 that rank below, 1 without a result; -v shows all",
        ),
        (2, ["x", "y"], "not shown: 8 that rank below, 1 without a result; -v shows all"),
        (11, ["x"] * 6 + ["y"] * 3 + ["z"], None),
    ],
)
def test_some_of_many_rows_of_each_model(
    monkeypatch: Patch, capsys: Capture, most: int, kept: list[str], note: str | None
) -> None:
    counts = {"x": 6, "y": 3, "z": 1}
    rows = [
        row(float(i), model=m, mode=f"m{i}") for m, count in counts.items() for i in range(count)
    ]
    data = sweep([*rows, unfit(model="x")], "model", "mode")
    if most == 6:  # one of them has no result
        most, data = 5, sweep(rows, "model", "mode")
    assert [best.model for best in best_rows(ranked(data), most)] == kept
    lines = lines_of(data, 80, monkeypatch, capsys, most)
    assert [line for line in lines if line.startswith("not shown")] == ([note] if note else [])


def test_each_job_has_one_throughput(monkeypatch: Patch, capsys: Capture) -> None:
    plain = row(2.0, metrics={"replicas": 1.0, "examples_per_s": 500.0})
    copied = row(2.0, metrics={"replicas": 4.0, "examples_per_s": 2000.0})
    lines = "\n".join(lines_of(sweep([plain, copied, unfit()]), 80, monkeypatch, capsys))
    for text in ("throughput", "examples/s", "500.00", "2,000.00", "infeasible"):
        assert text in lines
    assert "/s" not in lines.replace("examples/s", "", 1)


def test_the_gap_is_blank_for_jobs_without_one(monkeypatch: Patch, capsys: Capture) -> None:
    plain, copied = row(2.0, mode="single"), row(1.0, mode="pipeline")
    without = {name: value for name, value in copied.metrics.items() if "gap" not in name}
    copied = replace(copied, metrics=without)
    assert "gap" not in "".join(lines_of(sweep([copied], "mode"), 100, monkeypatch, capsys))
    lines = lines_of(sweep([plain, copied], "mode"), 100, monkeypatch, capsys)
    assert "gap" in "".join(lines)
    assert [line.count("25.0") for line in lines if "pipeline" in line or "single" in line] == [
        0,
        1,
    ]


SCHEDULED = {
    "step_ms": 32.0,
    "examples_per_s": 250.0,
    "bubble_pct": 25.0,
    "schedule_peak_gib": 3.5,
}


def test_schedules_and_measurements(monkeypatch: Patch, capsys: Capture) -> None:
    ran = {**SCHEDULED, "measured_ms": 40.0, "time_error_pct": -20.0}
    slow = {**SCHEDULED, "examples_per_s": 125.0}
    rows = [row(metrics=ran, schedule="1f1b"), row(metrics=slow, schedule="gpipe")]
    lines = lines_of(sweep(rows, "schedule"), 100, monkeypatch, capsys)
    assert lines.pop(0) == "2 runs, model=gpt2, mode=kl_based, devices=2x80gb, transfer_rate=pcie4"
    heading = " ".join(" ".join(line.split()) for line in lines[:2])
    assert heading == (
        "ms per throughput peak step bubble measured error"
        " schedule example examples/s GiB ms % parts ms %"
    )
    assert [line.split() for line in lines[3:-1]] == [
        ["*", "1f1b", "4.000", "250.00", "3.500", "32.000", "25.0", "4", "40.000", "-20.0"],
        ["gpipe", "8.000", "125.00", "3.500", "32.000", "25.0", "4", "-", "-"],
    ]
    assert lines[-1] == "* least time per example"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_narrow_terminal_leaves_out_some_numbers(
    monkeypatch: Patch, capsys: Capture, columns: int
) -> None:
    """Words are not cut, and the ranking column stays."""
    ran = {**SCHEDULED, "measured_ms": 1234.5, "time_error_pct": -20.0}
    rows = [
        row(metrics=ran, mode=mode, microbatches=count, model__batch_size="16")
        for mode in ("communication_aware", "kl_based")
        for count in ("8", "16")
    ]
    lines = lines_of(sweep(rows, "mode", "microbatches"), columns, monkeypatch, capsys)
    table = [line.split() for line in lines[4:8]]
    assert [cells[1:4] for cells in table] == [
        ["communication_aware", "16", "4.000"],
        ["communication_aware", "8", "4.000"],
        ["kl_based", "16", "4.000"],
        ["kl_based", "8", "4.000"],
    ]
    words = " ".join(lines[1:3]).split()
    assert ("step" in words) is (columns > 80)
    assert {"mode", "batches", "peak", "measured"} <= set(words)


def words_of(lines: list[str]) -> set[str]:
    return {word for line in lines for word in line.split()}


def test_no_word_is_cut_in_a_sweep_of_batch_sizes(monkeypatch: Patch, capsys: Capture) -> None:
    """The columns of ``experiment=batch_frontier``, with the values shared by all in the title."""
    rows = [
        row(
            metrics={**SCHEDULED, "step_ms": 1032.0, "examples_per_s": 120.0},
            mode="pipeline",
            model__batch_size=size,
            microbatches="16",
            checkpointing=kept,
        )
        for size in ("1", "16")
        for kept in ("none", "block")
    ]
    keys = ("model.batch_size", "microbatches", "checkpointing")
    rows.append(unfit(mode="pipeline", model__batch_size="32", microbatches="8"))
    for columns in (60, 100):
        lines = lines_of(sweep(rows, *keys), columns, monkeypatch, capsys)
        words = words_of(lines)
        assert "mode=pipeline," in words
        assert {"batch", "size", "micro-", "check-", "pointing", "example", "peak"} <= words
        assert {"1", "16", "none", "block", "8.333", "3.500", "infeasible"} <= words
        assert ("step" in words) is (columns == 100)


def test_settings_that_are_too_long_are_shortened(monkeypatch: Patch, capsys: Capture) -> None:
    """They are not wrapped, still differ, and the last line says where they are complete."""
    rows = [
        row(mode=mode, devices=devices, transfer_rate="ethernet_100g", schedule="interleaved_1f1b")
        for mode in ("communication_aware", "kl_based")
        for devices in ("2x16gb+2x24gb", "4x24gb")
    ]
    rows.append(row(status="lost", mode="single", transfer_rate="pcie4"))
    data = sweep(rows, "mode", "devices", "transfer_rate", "schedule")
    lines = lines_of(data, 80, monkeypatch, capsys, cut=True)
    assert "… settings are shortened to fit; the report has them whole" in lines
    table = [line.lstrip(" *=").split() for line in lines[4:9]]
    assert [len(cells) for cells in table] == [len(table[0])] * 5
    assert table[0][:4] == ["commun…_aware", "2x16gb+2x24gb", "ethernet_100g", "interl…d_1f1b"]
    assert len({tuple(cells[:4]) for cells in table}) == 5
    whole = {"communication_aware", "2x16gb+2x24gb", "ethernet_100g", "interleaved_1f1b"}
    assert whole <= words_of(lines_of(data, 120, monkeypatch, capsys))


def test_settings_that_would_be_cut_to_a_letter_are_left_out(
    monkeypatch: Patch, capsys: Capture
) -> None:
    """The last ones, of which the report still has all."""
    names = [f"setting_{letter}" for letter in "abcdefghijkl"]
    rows = [
        replace(job, settings={**job.settings, **dict.fromkeys(names, "usual_value"), name: "own"})
        for name, job in ((name, row(float(i))) for i, name in enumerate(names))
    ]
    lines = lines_of(sweep(rows, *names), 80, monkeypatch, capsys, cut=True)
    (left_out,) = (line for line in lines if line.startswith("not shown, for want of columns: "))
    assert left_out.endswith(", setting_k, setting_l; the report has them")
    shown = [name for name in names if name not in left_out]
    assert shown
    (first,) = (line.split() for line in lines if line.startswith(" *"))
    assert first[1] == "own"
    assert {len(text) for text in first[2 : 1 + len(shown)]} <= {9, 10}
    whole = lines_of(sweep(rows, *names), 250, monkeypatch, capsys)
    (first,) = (line.split() for line in whole if line.startswith(" *"))
    assert first[1 : 1 + len(names)] == ["own", *["usual_value"] * (len(names) - 1)]


def test_different_settings_stay_different_when_shortened() -> None:
    texts = ["blocks_of_two_a_x", "blocks_of_two_b_x", "y"]
    short = shortened(texts, 5)
    assert len(set(short.values())) == 3
    assert short["y"] == "y"
    assert shortened(["abcdefghij", "abcdefghik"], 4) == {
        "abcdefghij": "ab…j",
        "abcdefghik": "ab…k",
    }


def test_the_reasons_follow_the_table(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_sweep(sweep([row(1.0), unfit("needs 3 GiB", mode="single")], "mode"), 20)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "mode=single: needs 3 GiB"


def test_a_title_has_the_whole_width(monkeypatch: Patch, capsys: Capture) -> None:
    """Even above a table of two columns."""
    lines = lines_of(sweep([row(1.0, mode="a_mode")]), 100, monkeypatch, capsys)
    assert lines[0] == "1 run, model=gpt2, mode=a_mode, devices=2x80gb, transfer_rate=pcie4"
    assert len(lines[1].rstrip()) < 50


def test_models_are_separated_where_they_have_several_rows(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [row(float(n), model__config__n=n, mode=mode) for n in "19" for mode in "ab"]
    show_sweep(sweep([*rows, row(100.0, model__config__n="10", mode="a")]), None)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("*"))
    shown = ["".join(line.split()[:3]) for line in lines[first : first + 7]]
    assert shown == ["*1a", "=1b", "", "*9a", "=9b", "", "*10a"]
    assert "* lowest latency for its model" in lines


def test_the_command_in_the_note_gives_all_rows(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [row(1.0), row(2.0), row(3.0)]
    show_sweep(sweep(rows), 1, "--rows 3")
    assert "not shown: 2 that rank below; --rows 3 shows all" in capsys.readouterr().out
    # A note about a single hidden row would take as much space as the row.
    show_sweep(sweep(rows), 2, "--rows 3")
    assert "not shown" not in capsys.readouterr().out


def test_the_best_load_is_marked_where_throughput_is_the_objective(
    monkeypatch: Patch, capsys: Capture
) -> None:
    jobs = [
        row(ms, mode=mode, objective="throughput", metrics={"load_ms": load, "load_gap_pct": gap})
        for mode, ms, load, gap in (("size_based", 10.0, 9.0, 5.0), ("kl_based", 12.0, 7.0, 2.0))
    ]
    lines = lines_of(sweep(jobs, "mode"), 80, monkeypatch, capsys)
    assert " ".join(lines[1].split()) == "load gap latency peak"
    assert lines[4].split()[:5] == ["*", "kl_based", "7.000", "2.0", "12.000"]
    assert lines[-1] == "* lowest load"
