"""The table at the end of a sweep."""

from typing import TYPE_CHECKING

import pytest

from fxpart.errors import SpecError
from runner.ranking import sweep_reasons, sweep_row, sweep_table
from tests.runner.shown import shown

if TYPE_CHECKING:
    from collections.abc import Mapping


def row(mode: str, latency_ms: float | None, **more: object) -> dict[str, object]:
    return {
        "mode": mode,
        "devices": "2x80gb+4x16gb",
        "transfer_rate": "25GB/s",
        "model": "gpt2",
        "latency_ms": latency_ms,
        "peak_memory_gib": 1.5,
        "partitions": 4,
        "gap": 0.25,
        "feasible": latency_ms is not None,
        "reason": None,
        **more,
    }


def test_sweep_is_ranked_with_the_infeasible_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row("single", None, reason="needs 90 GB, the largest device has 80 GB"),
        row("size_based", 12.5),
        row("cost_aware", 1012.25),
        row("optimal", 12.25),
        row("kl_based", 12.25, devices="6x24gb"),
        row("aot_based", None, feasible=None, reason="KeyError"),
    ]
    lines = shown(sweep_table(rows), 80, monkeypatch, capsys)
    assert lines[0] == "6 runs, model=gpt2, transfer_rate=25GB/s"
    table = [line.split() for line in lines[4:-1]]
    assert [cells[:4] if cells[0] == "*" else cells[:3] for cells in table] == [
        ["*", "kl_based", "6x24gb", "12.250"],
        ["*", "optimal", "2x80gb+4x16gb", "12.250"],
        ["size_based", "2x80gb+4x16gb", "12.500"],
        ["cost_aware", "2x80gb+4x16gb", "1,012.250"],
        ["single", "2x80gb+4x16gb", "infeasible"],
        ["aot_based", "2x80gb+4x16gb", "failed"],
    ]
    assert table[0][-3:] == ["25.0", "1.500", "4"]
    assert lines[-1] == "* lowest latency"
    assert sweep_reasons(rows) == [
        "model=gpt2 mode=single devices=2x80gb+4x16gb transfer_rate=25GB/s:"
        " needs 90 GB, the largest device has 80 GB",
        "model=gpt2 mode=aot_based devices=2x80gb+4x16gb transfer_rate=25GB/s: KeyError",
    ]


def test_each_model_has_its_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("a", 5.0), row("b", 3.0), row("a", 50.0, model="llama"), row("b", 60.0, model="x")]
    lines = shown(sweep_table(rows), 100, monkeypatch, capsys)
    starred = [line.split()[1:3] for line in lines[:-1] if line.split()[0] == "*"]
    assert starred == [["gpt2", "b"], ["llama", "a"], ["x", "b"]]
    assert lines[-1] == "* lowest latency for its model"


def test_sweep_of_nothing_and_of_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(sweep_table([]), 80, monkeypatch, capsys)[0] == "0 runs"
    alone: list[Mapping[str, object]] = [{"mode": "single", "feasible": False}]
    lines = shown(sweep_table(alone), 80, monkeypatch, capsys)
    assert "infeasible" in lines[-1]
    assert sweep_reasons(alone) == ["mode=single: infeasible"]


def test_what_varies_has_a_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(
            "a",
            float(size * layers),
            **{
                "model.batch_size": str(size),
                "model.config.layers": str(layers),
                "mode.layers": str(-layers),
                "model.seq_len": "8",
            },
        )
        for size in (1, 64)
        for layers in (2, 3)
    ]
    lines = shown(sweep_table(rows), 100, monkeypatch, capsys)
    heading = " ".join(lines[2].split())
    assert heading.startswith("mode batch size model.config.layers mode.layers")
    assert lines[4].split()[:6] == ["*", "a", "1", "2", "-2", "2.000"]
    failed = [row("a", None, **{"model.batch_size": "0"}), row("a", 1.0)]
    assert "model.batch_size=0: infeasible" in sweep_reasons(failed)[0]


def test_an_override_that_names_the_model_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("a", 1.0, model=name, **{"model.factory": name}) for name in ("x:f", "y:g")]
    assert "factory" not in "\n".join(shown(sweep_table(rows), 100, monkeypatch, capsys))


def result_of(**changed: object) -> dict[str, object]:
    choices = {"model": "m", "mode": "a", "devices": "1x1gb", "transfer_rate": "pcie4"}
    return {
        "config": {"choices": choices, "overrides": ["+model=custom", "mode.depth='3'"]},
        "metrics": {"latency_ms": 2.0, "partitions": 3.0, "optimality_gap_pct": 25.0},
        "status": "finished",
        "error": None,
        **changed,
    }


def test_a_row_is_made_of_a_result() -> None:
    made = sweep_row(result_of())
    assert (made["model"], made["mode.depth"]) == ("m", "3")
    assert (made["partitions"], made["gap"], made["feasible"]) == (3, 0.25, True)
    assert sweep_row(result_of(status="failed"))["feasible"] is None


@pytest.mark.parametrize("config", [None, {}, {"choices": {}}, {"choices": {}, "overrides": [3]}])
def test_a_result_without_settings_is_refused(config: object) -> None:
    with pytest.raises(SpecError, match="no settings"):
        sweep_row(result_of(config=config))


def test_replicas_show_what_they_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = row("single", 2.0, replicas=1, throughput_per_s=500.0)
    copied = row("single", 2.0, replicas=4, throughput_per_s=2000.0)
    assert "per s" not in "".join(shown(sweep_table([plain]), 80, monkeypatch, capsys))
    failed = row("single", None, reason="too large")
    lines = "\n".join(shown(sweep_table([plain, copied, failed]), 100, monkeypatch, capsys))
    for said in ("per s", "500.00", "2,000.00", "infeasible"):
        assert said in lines


def piped(schedule: str, rate: float, **more: object) -> dict[str, object]:
    """Return the row of a pipeline of so many microbatches a second, 8 a step."""
    return row(
        "pipeline",
        5.0,
        schedule=schedule,
        step_ms=8e3 / rate,
        microbatch_ms=1e3 / rate,
        bubble_pct=25.0,
        schedule_peak_gib=3.5,
        **more,
    )


def test_schedules_are_ranked_by_time_per_microbatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of fewer microbatches may be shorter, and is not better for it."""
    short = {**piped("gpipe", 200.0), "step_ms": 20.0}
    failed = row("pipeline", None, schedule="gpipe", reason="too large")
    rows = [short, piped("1f1b", 250.0), failed]
    lines = shown(sweep_table(rows), 100, monkeypatch, capsys)
    assert [line.split() for line in lines[5:-1]] == [
        ["*", "pipeline", "1f1b", "4.000", "32.000", "25.0", "3.500", "4"],
        ["pipeline", "gpipe", "5.000", "20.000", "25.0", "3.500", "4"],
        ["pipeline", "gpipe", "infeasible", "-", "-", "-", "-"],
    ]
    heading = " ".join(" ".join(line.split()) for line in lines[1:4])
    assert heading == "ms per micro- step bubble peak mode schedule batch ms % GiB parts"
    assert lines[-1] == "* least time per microbatch"


@pytest.mark.parametrize(
    ("key", "values", "heading"),
    [("microbatches", (16, 8), "micro- batches"), ("schedule", ("1f1b", "gpipe"), "schedule")],
)
def test_words_are_not_cut_where_all_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
    values: tuple[object, object],
    heading: str,
) -> None:
    ran = {"measured_ms": 1234.5, "time_error_pct": -20.0}
    rows = [{**piped("gpipe", 200.0, microbatches=8, **ran), key: value} for value in values]
    lines = shown(sweep_table(rows), 80, monkeypatch, capsys)
    words = " ".join(lines[1:4]).split()
    assert {*heading.split(), "mode", "bubble", "parts", "measured", "error"} <= set(words)
    assert [line.split()[1:3] for line in lines[5:-1]] == [
        ["pipeline", str(value)] for value in values
    ]


def test_rows_with_and_without_a_schedule_are_ranked_by_latency(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [piped("1f1b", 250.0), row("kl_based", 2.0)]
    lines = shown(sweep_table(rows), 100, monkeypatch, capsys)
    assert lines[-1] == "* lowest latency"
    assert lines[-3].split()[:2] == ["*", "kl_based"]
    assert "bubble" not in "".join(lines)


def test_what_was_measured_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = {"measured_ms": 40.0, "time_error_pct": -20.0}
    rows = [piped("1f1b", 250.0, **ran), piped("gpipe", 125.0)]
    lines = shown(sweep_table(rows), 100, monkeypatch, capsys)
    assert lines[5].split()[-3:] == ["4", "40.000", "-20.0"]
    assert lines[6].split()[-3:] == ["4", "-", "-"]
    local = [row("kl_based", 2.0, measured_ms=2.5, time_error_pct=12.5), row("single", None)]
    lines = shown(sweep_table(local), 100, monkeypatch, capsys)
    assert lines[-3].split()[2:] == ["2.000", "25.0", "1.500", "4", "2.500", "+12.5"]
    assert "measured" in "".join(lines)
    assert lines[-2].split()[1:] == ["infeasible", *"-----"]


def test_a_row_of_a_schedule_is_made_of_a_result() -> None:
    scheduled = {"latency_ms": 2.0, "step_ms": 32.0, "microbatches_per_s": 250.0}
    made = sweep_row(result_of(metrics={**scheduled, "bubble_pct": 25.0, "measured_ms": 40.0}))
    assert (made["step_ms"], made["microbatch_ms"], made["bubble_pct"]) == (32.0, 4.0, 25.0)
    assert made["measured_ms"] == 40.0
    assert sweep_row(result_of())["microbatch_ms"] is None
    # What takes no time has an infinite rate, which the file does not say.
    at_once = {"latency_ms": 0.0, "step_ms": 0.0, "microbatches_per_s": None}
    assert sweep_row(result_of(metrics=at_once))["microbatch_ms"] == 0.0
