"""Rows of gpt-fast are runs of the command; rows without a run are named."""

import json
from pathlib import Path

import pytest

from benchmarks.truth import gpt_fast
from benchmarks.truth.planned_run import planned_run

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def point(**fields: object) -> dict[str, object]:
    known = {
        "model": "tiny",
        "hardware": "A100-80GB",
        "n_devices": 1,
        "dtype": "bf16",
        "value": 5.0,
    }
    return {"source": "github: gpt-fast", "metric": "tokens_per_s", **known, **fields}


@pytest.mark.parametrize("dtype", ["bf16", "int4-g32"])
def test_a_row_is_planned_over_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setitem(gpt_fast.MODELS, "tiny", ("llama3_1_8b", TINY))
    (tmp_path / "measured.json").write_text(json.dumps([point(dtype=dtype)]))
    (row,) = gpt_fast.rows(tmp_path)
    few_bits = ("weights=int4", "weights.keep=[]", "weights.group_size=32")
    overrides = (
        "model=llama3_1_8b",
        *(f"model.config.{name}={size}" for name, size in TINY.items()),
        "phase=decode",
        "context_len=105",
        "devices=1xa100_80gb",
        "runtime=compiled",
        "mode=single",
        "latency=kernels",
        *(few_bits if dtype != "bf16" else ()),
    )
    token_s = planned_run(overrides).evaluation.latency_s
    assert 1 / row.predicted == pytest.approx(token_s, rel=1e-6)
    assert row.held_out == (dtype == "bf16")


def test_rows_without_a_run_are_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"model": "Llama-2-7B"}
    points = [
        point(model="Strange-3B"),
        point(**known, hardware="MI-250x"),
        point(**known, metric="fits", value=False),
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert not list(gpt_fast.rows(tmp_path))
    printed = capsys.readouterr().out
    assert "Strange-3B bf16 on 1 of A100-80GB is left out: no preset" in printed
    assert "MI-250x is left out" in printed
    assert "3 of 3 rows are left out" in printed
