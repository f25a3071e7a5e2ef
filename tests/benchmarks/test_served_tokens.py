"""Served tokens are generations whose prompts are computed in turn."""

import json
from pathlib import Path

import pytest

from benchmarks.truth import gpt_fast, served_tokens
from benchmarks.truth.planned_run import planned_run
from tests.benchmarks.test_gpt_fast import TINY

KNOWN = {
    "source": "github:ai-dynamo/aiconfigurator",
    "model": "meta-llama/Llama-3.1-70B",
    "hardware": "h100_sxm",
    "n_devices": 2,
    "dtype": "fp8",
    "batch": 4,
    "seq": "isl 1024 osl 512",
    "parallel": "TP=2 vllm ",
    "metric": "tpot_ms",
    "value": 5.0,
}


def _alone_s(*overrides: str) -> float:
    model = ("model=llama3_70b", *(f"model.config.{name}={size}" for name, size in TINY.items()))
    devices = ("devices=2xh100", "tensor_parallel=2", "transfer_rate=nvlink4")
    weights = ("weights=fp8", "weights.activations=fp8")
    times = ("runtime=compiled", "mode=single", "latency=kernels")
    run = planned_run((*model, *devices, *weights, *times, *overrides))
    return run.evaluation.latency_s


def test_a_row_is_a_decode_and_the_wait_for_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpt_fast.MODELS, "Llama-3.1-70B", ("llama3_70b", TINY))
    (tmp_path / "measured.json").write_text(json.dumps([KNOWN]))
    (row,) = served_tokens.rows(tmp_path)
    decode_s = _alone_s("phase=decode", "context_len=1280", "model.batch_size=4")
    prompt_s = _alone_s("phase=prefill", "model.seq_len=1024")
    # While a text gets its 511 further tokens, the three others are replaced.
    assert row.predicted == pytest.approx(1e3 * (decode_s + 3 * prompt_s / 511), rel=1e-3)
    assert row.held_out


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"metric": "ttft_ms"}, "waiting for other requests"),
        ({"model": "strange"}, "no preset describes the model"),
        ({"hardware": "gb200"}, "no curves of gb200"),
        ({"dtype": "nvfp4"}, "no layout for nvfp4"),
        ({"parallel": "PP=2 vllm"}, "other than tensor parallel"),
    ],
)
def test_rows_without_a_run_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, str], reason: str
) -> None:
    (tmp_path / "measured.json").write_text(json.dumps([{**KNOWN, **other}]))
    assert not list(served_tokens.rows(tmp_path))
    assert reason in capsys.readouterr().out
