"""Published training steps: the run of a row, and its result."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth import end_to_end
from benchmarks.truth.end_to_end import Figures, Inexpressible, Pipeline, Run, rows, run_of

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
    by_blocks = {"runtime=compiled", "runtime.regional=true"}
    assert by_blocks | {"float8=tensorwise"} <= set(compiled.overrides)
    with_loss = "runtime.compiled_loss=true"
    assert with_loss not in compiled.overrides
    for month in ("2025-06", "202506"):
        later = POINT | {"source": f"github:pytorch/torchtitan benchmarks/llama3_{month}_x.md"}
        assert with_loss in run_of(later | {"parallel": "FSDP=16 torch.compile"}).overrides
        assert with_loss not in run_of(later).overrides
    assert "devices=8xa100_40gb+8xa100_40gb" in plain.overrides
    for stated, overlaps in {"vanilla TP": False, "async TP": True, "asyncTP": True}.items():
        groups = run_of(POINT | {"parallel": f"FSDP=2 TP=8 {stated} torch.compile"})
        shares = {"tensor_parallel=8", "sequence_parallel=true", "loss_parallel=true"}
        assert shares <= set(groups.overrides)
        assert ("async_tensor_parallel=true" in groups.overrides) == overlaps
        assert "model.batch_size=4" in groups.overrides
        assert groups.tokens == 2 * 8192 / 8
    assert "optimizer.master_weights=false" in plain.overrides
    assert plain.tokens == 4 * 8192


def test_a_pipeline_s_figures_follow_from_those_of_fewer_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = "FSDP=4 TP=8 PP=8 CP=2 interleaved-1F1B asyncTP torch.compile"
    deep = {"model": "Llama-3.1-405B", "n_devices": 512, "batch": "local 32"}
    run = run_of(POINT | deep | {"parallel": parallel})
    assert {
        "model.batch_size=16",
        "data_parallel=4",
        "context_parallel=2",
        "zero=2",
        "reduce_dtype=float32",
        "microbatches=8",
        "schedule=interleaved",
        "mode.interleave=2",
    } <= set(run.overrides)
    assert run.tokens == 32 * 8192 * 4 / 512
    assert run.pipeline == Pipeline(chunks=16, layers=126)

    def planned(few: Run) -> Figures:
        # Of a second for each layer of a stage, on a start of ten.
        layers = int(few.overrides[-1].removeprefix("model.config.num_hidden_layers="))
        return Figures(10 + layers / 16, 20 + 2 * layers / 16, layers)

    monkeypatch.setattr(end_to_end, "_planned", planned)
    figures = end_to_end._figures(run)
    assert figures == Figures(10 + 126 / 16, 20 + 2 * 126 / 16, 32)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parallel": "FSDP=16 EP=2 torch.compile"}, "nothing stands for EP=2"),
        ({"parallel": "FSDP=2 TP=4"}, "are not the degrees of 16 devices"),
        ({"parallel": "FSDP=8 PP=2"}, "nothing stands for FSDP=8 PP=2"),
        ({"parallel": "FSDP=8 PP=2 1F1B"}, "pipelines of Llama-3.1-8B have no number of layers"),
        (
            {"model": "Llama-3.1-405B", "parallel": "FSDP=4 PP=4 1F1B"},
            "a batch of 2 is not 4 equal microbatches",
        ),
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
        tiny | {"parallel": "FSDP=2 EP=2"},
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
    assert "nothing stands for EP=2" in printed
    assert "1 rows are left out: {'tokens_per_s_per_gpu': 1}" in printed
