"""The set of published runs with offload: its fields, and memory as counted by accelerate."""

import json
from pathlib import Path

import pytest
from accelerate.utils import compute_module_sizes

from benchmarks.truth import flexgen, offload, vllm_cache
from fxpart.capture.models.build import build_model
from fxpart.core.topology import Link

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


def test_omitted_rows_are_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        {**TABLE, "model": "T0pp (11B)", "metric": "time_per_token", "value": 1.0},
        {**RUN, "model": "OPT-30B", "parallel": "FlexGen CPU"},
        {**RUN, "source": "github: another"},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert not list(offload.rows(tmp_path))
    printed = capsys.readouterr().out
    assert (
        "T0pp (11B) fp32, device_map auto + CPU offload + disk offload, is left out: no" in printed
    )
    assert "OPT-30B fp16, FlexGen CPU, is left out" in printed
    assert "2 rows are left out" in printed


def test_a_fitted_time_returns_the_share_that_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 s of copies at the full link besides 2 s of computing; 1 / 8 tokens per second.
    monkeypatch.setattr(offload, "_generated_per_s", lambda _, share=0.3: 1 / (2 + 3 / share))
    points = [{**RUN, "model": "OPT-30B", "value": 1 / 8}, {**RUN, "model": "OPT-6.7B"}]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert "a share of 0.50 (OPT-30B fp16), 0.3 is taken" in offload.fit_note(tmp_path, [])


@pytest.mark.filterwarnings("ignore")
def test_memory_follows_the_device_map_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MODELS", {"tiny": ("OPTForCausalLM", TINY)})
    # A layer has 3 MiB, and space for one is kept on the first device and on the CPU.
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
    by_label = {row.label: row for row in offload.rows(tmp_path)}
    assert len(by_label) == 5
    spec = offload._spec("tiny", "fp32", batch=1, length=1)
    entries = offload._accelerate_map(spec)
    assert set(entries.values()) == {0, 1, "cpu", "disk"}
    sizes = compute_module_sizes(build_model(spec).module)
    for place in (0, 1, "cpu"):
        size = sum(sizes[path] for path, home in entries.items() if home == place)
        predicted = by_label[f"tiny fp32 memory of {place}"].predicted
        assert predicted == pytest.approx(size / 2**20 / 1000, rel=0.01)
    assert {row.unit for row in by_label.values()} == {"1000 MiB", "s", "tokens/s"}


@pytest.mark.filterwarnings("ignore")
def test_flexgen_copies_weights_once_for_its_batches_and_each_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flexgen, "MODELS", {"tiny": ("OPTForCausalLM", TINY)})
    monkeypatch.setattr(flexgen, "_POLICIES", {("tiny", 8): flexgen.Policy(2, 0.4)})
    # So slow that only copies take time.
    monkeypatch.setattr(flexgen, "PCIE3", Link(1e4, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path))
    run = {**RUN, "parallel": "FlexGen CPU", "batch": 8}
    (tmp_path / "measured.json").write_text(json.dumps([run, {**run, "batch": 9}, RUN]))
    (row,) = flexgen.rows(tmp_path)
    assert "tiny FlexGen CPU 9, 8 in + 4 out, is left out: its policy is not known" in (
        capsys.readouterr().out
    )
    # Of five layers three are copied: 12 matrices of 256 x 256, 9 biases and 4 vectors of norms;
    # and the positions.
    width, texts = 256, 8
    weights = 2 * (3 * (12 * width * width + (9 + 4) * width) + 2050 * width)
    cached = 5 * 2 * 2 * width * texts * (8 + 4 // 2 - 1)  # except for the written token
    rate = 0.8 * 1e4
    prompt_s, token_s = weights / rate, (weights + cached) / rate
    assert row.predicted == pytest.approx(8 * 4 / (prompt_s + 3 * token_s), rel=0.02)


def test_a_profile_run_of_vllm_takes_the_memory_in_its_logs() -> None:
    # "PyTorch activation peak memory takes 1.19GiB": Llama-3.1-8B, 256 texts, after 2,048 tokens.
    peak = vllm_cache.sampler_bytes(256, 128_256) + 2 * 2048 * 4096
    assert peak / 2**30 == pytest.approx(1.19, rel=0.02)
    tokens = vllm_cache.cached_tokens(weight_bytes=16 * 10**9, pass_bytes=0, token_bytes=2**17)
    budget = 0.9 * 25_250_627_584 - 16 * 10**9 - peak - 2 * 131_072 * 128 - 2**26
    assert tokens == budget // (16 * 2**17) * 16
    less = vllm_cache.cached_tokens(
        weight_bytes=16 * 10**9, pass_bytes=2 * 10**9, token_bytes=2**17
    )
    assert less == (budget + peak - 2 * 10**9) // (16 * 2**17) * 16
