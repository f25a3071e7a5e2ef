"""Published training steps: the run of a row, and its result."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth import end_to_end
from benchmarks.truth.end_to_end import Inexpressible, rows, run_of

POINT: dict[str, Any] = {
    "source": "github:pytorch/torchtitan benchmarks/llama3.md",
    "model": "Llama-3.1-8B",
    "hardware": "H100 SXM 96GB HBM2e 2.4TB/s 500W, NVLink node",
    "n_devices": 16,
    "dtype": "bf16",
    "batch": "local 2",
    "seq": 8192,
    "parallel": "FSDP=16",
    "phase": "train",
    "metric": "tokens_per_s_per_gpu",
    "value": 5000,
    "unit": "tok/s/GPU",
    "activation_checkpointing": "selective",
}


def test_a_row_becomes_a_run() -> None:
    run = run_of(POINT)
    for override in (
        "model=llama3_1_8b",
        "model.batch_size=32",
        "model.seq_len=8192",
        "devices=8xh100+8xh100",
        "devices.nodes=[0,1]",
        "checkpointing=selective",
        "optimizer.master_weights=true",
        "data_parallel=16",
        "zero=3",
    ):
        assert override in run.overrides
    assert (run.memory_bytes, run.bytes_per_s, run.tokens) == (96 * 10**9, 2.4e12, 2 * 8192)
    assert run.compute_share == pytest.approx(math.sqrt(5 / 7))
    plain = run_of(
        POINT | {"hardware": "A100-40GB", "dtype": "bf16 pure", "batch": "micro 4 accum 2"}
    )
    assert plain.compute_share == 1
    assert "runtime=eager" in plain.overrides
    assert not any(override.startswith("float8") for override in run.overrides)
    compiled = run_of(POINT | {"parallel": "FSDP=16 CP=1 torch.compile", "dtype": "float8 linears"})
    assert {"runtime=compiled", "float8=tensorwise"} <= set(compiled.overrides)
    assert "devices=8xa100_40gb+8xa100_40gb" in plain.overrides
    for stated, overlaps in {"vanilla TP": False, "async TP": True, "asyncTP": True}.items():
        groups = run_of(POINT | {"parallel": f"FSDP=2 TP=8 {stated} torch.compile"})
        assert {"tensor_parallel=8", "sequence_parallel=true"} <= set(groups.overrides)
        assert ("async_tensor_parallel=true" in groups.overrides) == overlaps
        assert "model.batch_size=4" in groups.overrides
        assert groups.tokens == 2 * 8192 / 8
    assert "optimizer.master_weights=false" in plain.overrides
    assert plain.tokens == 4 * 8192


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parallel": "FSDP=16 PP=1 torch.compile"}, "nothing stands for PP=1 torch.compile"),
        ({"parallel": "FSDP=2 TP=4"}, "is more than FSDP"),
        ({"parallel": "FSDP=2 TP=8", "metric": "peak_memory"}, "from shards of the logits"),
        ({"dtype": "int8 linears"}, "products are in int8 linears"),
        ({"activation_checkpointing": None}, "activation checkpointing None is not known"),
        ({"model": "Llama-3.1-9B"}, "has no configuration here"),
        ({"hardware": "MI300X"}, "no training step on known devices"),
        ({"n_devices": 12, "parallel": "FSDP=12"}, "no whole machines"),
        ({"batch": "global 64"}, "not stated for a device"),
    ],
)
def test_an_inexpressible_row_has_a_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        run_of(POINT | changed)


def test_rows_are_planned_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "captured"))
    monkeypatch.setitem(end_to_end._MPT, "tiny", (64, 2, 4))
    tiny = POINT | {
        "source": "github:mosaicml/llm-foundry README.md",
        "model": "MPT-tiny",
        "seq": 32,
        "n_devices": 2,
        "parallel": "FSDP FULL_SHARD=2",
        "activation_checkpointing": "none",
    }
    points = [
        tiny,
        tiny | {"metric": "peak_memory", "value": 0.1, "unit": "GiB"},
        tiny | {"parallel": "FSDP=2 CP=2"},
        POINT | {"source": "another engine"},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    speed, memory = rows(tmp_path)
    assert speed.measured == 5000
    assert speed.predicted > 0
    # Half of the float32 weights and two states of the vocabulary, and less than ten times all.
    weights = 50368 * 64 * 4 / 2**30
    assert 1.5 * weights < memory.predicted < 30 * weights
    printed = capsys.readouterr().out
    assert "MPT-tiny" in printed
    assert "nothing stands for CP=2" in printed
    assert "1 rows are left out: {'tokens_per_s_per_gpu': 1}" in printed
