"""The set of published runs with offload: its fields, and memory as accelerate itself counts it."""

import json
from pathlib import Path

import pytest
from accelerate.utils import compute_module_sizes

from benchmarks.truth import offload
from fxpart.capture.models.build import build_model

TINY = {
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
TABLE = {
    "source": "github:huggingface/accelerate benchmarks",
    "model": "tiny",
    "dtype": "fp32",
    "batch": 1,
    "seq": None,
    "parallel": "device_map auto + CPU offload + disk offload",
}
RUN = {
    "source": "github:FMInference/FlexLLMGen README.md",
    "model": "tiny",
    "dtype": "fp16",
    "batch": 2,
    "seq": "8 in + 4 out",
    "parallel": "HF Accelerate offload CPU",
    "metric": "tokens_per_s",
    "value": 1.0,
}


def test_what_is_left_out_is_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        {**TABLE, "model": "T0pp (11B)", "metric": "time_per_token", "value": 1.0},
        {**RUN, "model": "OPT-30B", "parallel": "FlexGen CPU"},
        {**RUN, "source": "github: another"},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert not list(offload.rows(tmp_path))
    told = capsys.readouterr().out
    assert "T0pp (11B) fp32, device_map auto + CPU offload + disk offload, is left out: no" in told
    assert "OPT-30B fp16, FlexGen CPU, is left out" in told
    assert "2 rows are left out" in told


def test_a_fitted_time_asks_for_the_share_that_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 s of copies at the full link beside 2 s of computing; 1 / 8 tokens per second.
    monkeypatch.setattr(offload, "_generated_per_s", lambda _, share=0.3: 1 / (2 + 3 / share))
    points = [{**RUN, "model": "OPT-30B", "value": 1 / 8}, {**RUN, "model": "OPT-6.7B"}]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert "a share of 0.50 (OPT-30B fp16), 0.3 is taken" in offload.asked_for(tmp_path, [])


@pytest.mark.filterwarnings("ignore")
def test_memory_is_that_of_the_modules_in_accelerates_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_MODELS", {"tiny": ("OPTForCausalLM", TINY)})
    # A layer has 3 MiB, and room for one is kept on the first device and on the CPU.
    monkeypatch.setattr(offload, "_FREE_MIB", {0: 9, 1: 4, "cpu": 7})
    monkeypatch.setenv("HOME", str(tmp_path))
    points = [
        {**TABLE, "metric": "memory_per_device", "value": [1.0, 1.0, 1.0]},
        {**TABLE, "metric": "time_per_token", "value": 1.0},
        RUN,
        {**RUN, "model": "another"},
        {**RUN, "parallel": "FlexGen CPU"},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    found = {row.label: row for row in offload.rows(tmp_path)}
    assert len(found) == 5
    spec = offload._spec("tiny", "fp32", batch=1, length=1)
    entries = offload._accelerate_map(spec)
    assert set(entries.values()) == {0, 1, "cpu", "disk"}
    sizes = compute_module_sizes(build_model(spec).module)
    for place in (0, 1, "cpu"):
        size = sum(sizes[path] for path, home in entries.items() if home == place)
        predicted = found[f"tiny fp32 memory of {place}"].predicted
        assert predicted == pytest.approx(size / 2**20 / 1000, rel=0.01)
    assert {row.unit for row in found.values()} == {"1000 MiB", "s", "tokens/s"}
