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
