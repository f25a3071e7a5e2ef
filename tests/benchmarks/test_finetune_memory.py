"""Rows of fine-tuning become runs, or are left out by name."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.truth import finetune_memory
from benchmarks.truth.row import Row

_POINT = {
    "source": "github:Lightning-AI/litgpt",
    "model": "phi-1.5 (1.3B)",
    "n_devices": 1,
    "dtype": "bf16-true",
    "batch": "micro 1",
    "seq": 8,
    "parallel": "single",
    "phase": "train-LoRA r8",
    "metric": "peak_memory",
    "value": 4.0,
    "unit": "GB",
}


def _rows(tmp_path: Path, *changed: dict[str, object]) -> list[Row]:
    points = [{**_POINT, **fields} for fields in changed]
    (tmp_path / "measured.json").write_text(json.dumps(points), encoding="utf-8")
    return list(finetune_memory.rows(tmp_path))


def test_rows_without_a_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out: dict[str, dict[str, object]] = {
        "no peak": {"metric": "tokens_per_s", "unit": "tok/s"},
        "several devices": {"n_devices": 2},
        "no configuration": {"model": "Falcon-40B"},
        "scales in few bits too": {"dtype": "bnb.nf4-dq"},
        "weights, gradients and AdamW": {"phase": "train-full fine-tune", "value": 1e6},
        "states in 8 bits": {"phase": "train-full", "note": "8-bit"},
    }
    assert _rows(tmp_path, *left_out.values()) == []
    *lines, summary = capsys.readouterr().out.splitlines()
    for line, reason in zip(lines, left_out, strict=True):
        assert f"is left out: {reason}" in line
    assert summary.startswith("6 rows are left out")


def test_a_row_is_the_peak_of_a_run_of_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def planned(overrides: tuple[str, ...], layers: int) -> object:
        calls.append(overrides)
        return type("R", (), {"peak_bytes": 10**9 + layers * 10**8})

    monkeypatch.setattr(finetune_memory, "_planned", planned)
    (row,) = _rows(tmp_path, {"dtype": "bnb.nf4", "seq": 16})
    assert row.predicted == pytest.approx(1 + 24 * 0.1)
    assert not row.held_out
    wanted = {"finetune.rank=8", "weights=nf4", "model.seq_len=16", "model.batch_size=1"}
    assert wanted <= set(calls[0])
    calls.clear()
    paged = {"phase": "train-full", "note": "paged 8-bit optimizer recipe"}
    (row,) = _rows(tmp_path, {**paged, "seq": 2048})
    assert {"offload.optimizer=all", "checkpointing=block"} <= set(calls[0])


def test_the_loss_is_that_of_the_next_token() -> None:
    scores, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    chosen = scores.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])
    result = type("R", (), {"logits": scores})
    loss = finetune_memory.language_loss(result, {"input_ids": tokens})
    assert loss.item() == pytest.approx(-chosen.mean().item())
