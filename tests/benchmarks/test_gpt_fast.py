"""gpt-fast's rows: what is alike is captured once, and what is not known here is named."""

import json
from pathlib import Path

import pytest

from benchmarks.truth import gpt_fast

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def _point(**fields: object) -> dict[str, object]:
    known = {
        "model": "tiny",
        "hardware": "A100-80GB",
        "n_devices": 1,
        "dtype": "bf16",
        "value": 5.0,
    }
    return {"source": "github: gpt-fast", "metric": "tokens_per_s", **known, **fields}


def test_a_few_layers_say_what_all_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt_fast._MODELS, "tiny", ("llama3_1_8b", _TINY))
    (tmp_path / "measured.json").write_text(json.dumps([_point()]))
    (row,) = gpt_fast.rows(tmp_path)
    whole = gpt_fast._graph("tiny", "bf16", 1, 5)
    assert 1 / row.predicted == pytest.approx(gpt_fast._times(whole)[whole.flops > 0].sum())


def test_devices_share_layers_and_sum_twice_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt_fast._MODELS, "tiny", ("llama3_1_8b", _TINY))
    # Each sum of 128 bytes takes the launch and a hop of NCCL on an A100, some 10 us.
    alone_s, split_s = (gpt_fast._token_s("tiny", "bf16", n) for n in (1, 2))
    assert split_s - alone_s == pytest.approx(10 * 10e-6, rel=0.2)


def test_what_no_preset_describes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [_point(model="Strange-3B"), _point(model="Llama-2-7B", hardware="MI-250x")]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert not list(gpt_fast.rows(tmp_path))
    told = capsys.readouterr().err
    assert "Strange-3B bf16 on 1" in told
    assert "MI-250x" in told
