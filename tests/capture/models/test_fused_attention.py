"""``attn_implementation=fused``, against attention of transformers as products."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fxpart.capture.captured import captured_graph
from fxpart.capture.models.architecture import architecture_model
from fxpart.capture.models.build import build_model
from fxpart.capture.models.cached_step import prepare_step
from fxpart.capture.models.fused_attention import FUSED
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.absorbed import latent_projections
from fxpart.core.graph import CACHE, OpGraph
from fxpart.errors import SpecError
from fxpart.execution.stages.stage_archive import read_archive, stage_program, write_archive

_WINDOW = 5
_TEXT: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "sliding_window": _WINDOW,
}
_TWO_PARTS: dict[str, object] = {
    "text_config": _TEXT,
    "vision_config": {"num_hidden_layers": 1, "hidden_size": 24, "image_size": 28},
}
_KINDS: dict[str, dict[str, object]] = {
    "GptOssForCausalLM": {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2ForCausalLM": {**_TEXT, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
}


def _spec(architecture: str, implementation: str, prompt: int, step: str) -> ModelSpec:
    return ModelSpec(
        "m",
        architecture=architecture,
        config={**_KINDS[architecture], "attn_implementation": implementation},
        batch_size=2,
        seq_len=prompt,
        step=step,
        cache_len=prompt + 1,
    )


def _logits(spec: ModelSpec) -> list[torch.Tensor]:
    """Return the logits after a prompt, and after the token that follows it."""
    torch.manual_seed(0)
    module: Any = (built := build_model(spec, torch.device("cpu"))).module
    for name, weight in module.named_parameters():
        if name.endswith("sinks"):
            weight.data.copy_(torch.arange(weight.numel()) / 2)
    inputs = built.kwargs
    for name, tensor in inputs.items():
        if name.startswith(CACHE):
            tensor.zero_()
    with torch.no_grad():
        first = module(**inputs)
        decode = prepare_step(module, replace(spec, step="decode"))
        second = {name: inputs.get(name, like) for name, like in decode.items()}
        return [first, module(**{**second, "input_ids": torch.full((2, 1), 7)})]


@pytest.mark.parametrize("architecture", _KINDS)
@pytest.mark.parametrize("prompt", [_WINDOW - 2, 3 * _WINDOW])
def test_a_prompt_and_a_token_have_the_logits_of_products(architecture: str, prompt: int) -> None:
    fused, eager = (
        _logits(_spec(architecture, implementation, prompt, "prefill"))
        for implementation in (FUSED, "eager")
    )
    torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-5)


def _attention(step: str, prompt: int) -> tuple[OpGraph, list[int]]:
    graph = captured_graph(_spec("GptOssForCausalLM", FUSED, prompt, step), "operator", None).graph
    return graph, [op for op, name in enumerate(graph.targets) if "attention" in name]


def test_keys_outside_of_a_window_are_not_counted() -> None:
    """Layers alternate: the first of a pair has a window."""
    graph, (windowed, whole) = _attention("prefill", 12)
    pairs = sum(min(query + 1, _WINDOW) for query in range(12))
    # Batch 2, 4 heads, products with keys and values of size 8.
    assert graph.flops[[windowed, whole]].tolist() == [2 * 2 * 4 * n * 16 for n in (pairs, 144)]
    assert graph.attention.tolist() == [[windowed, 8, 0], [whole, 8, 1]]
    graph, ops = _attention("decode", 12)
    assert graph.flops[ops].tolist() == [2 * 2 * 4 * n * 16 for n in (_WINDOW, 13)]


def test_keys_are_not_repeated_and_sinks_are_no_projection_of_latents() -> None:
    graph, ops = _attention("decode", 12)
    sizes = {"keys or values": 2 * 2 * 13 * 8 * 4, "queries": 2 * 4 * 8 * 4, "sinks": 4 * 4}
    # Both of keys and values, queries and results.
    expected = 2 * sizes["keys or values"] + 2 * sizes["queries"] + sizes["sinks"]
    assert graph.moved_bytes[ops[1]] == expected
    assert not np.isin(ops, latent_projections(graph)).any()


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("BloomForCausalLM", {"n_layer": 1}, "has attention code of its own"),
        ("BertModel", {"num_hidden_layers": 1}, "has attention that is not causal"),
        ("BartForConditionalGeneration", {"encoder_layers": 1}, "has attention that is not causal"),
        ("CLIPTextModel", {"num_hidden_layers": 1}, "has attention that is not causal"),
        (
            "Gemma3ForCausalLM",
            {**_TEXT, "use_bidirectional_attention": True},
            "has attention that is not causal",
        ),
        ("Llama4ForCausalLM", {"num_hidden_layers": 1}, "sees chunks of tokens"),
        ("LlavaForConditionalGeneration", {}, "has attention that is not causal"),
    ],
)
def test_attention_that_masks_otherwise_is_refused(
    architecture: str, config: dict[str, object], reason: str
) -> None:
    config = {**config, "attn_implementation": FUSED}
    with pytest.raises(SpecError, match=f"^attn_implementation=fused .*{reason}.*; leave out"):
        architecture_model(architecture, config, torch.float32)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fusedd", "=fusedd does not exist; nearest: fused"),
        ("flash_attention", "=flash_attention does not exist; nearest: flash_attention_"),
        ({"text_config": "eagre"}, "=eagre does not exist; nearest: eager"),
        ({"text": "eager"}, " has no part text; nearest: text_config"),
        (3, "=3 must be a name, such as eager or sdpa, or a mapping"),
        ({"text_config": FUSED, "vision_config": "eager"}, "=fused .* that is not causal"),
    ],
)
def test_an_attention_that_does_not_exist_is_refused(setting: object, message: str) -> None:
    config = {**_TWO_PARTS, "attn_implementation": setting}
    with pytest.raises(SpecError, match=f"^attn_implementation{message}"):
        architecture_model("Gemma3ForConditionalGeneration", config, torch.float32)


def test_parts_have_their_own_attention() -> None:
    attentions = {"text_config": "eager", "vision_config": "sdpa"}
    config = {**_TWO_PARTS, "attn_implementation": attentions}
    model = architecture_model("Gemma3ForConditionalGeneration", config, torch.float32)
    parts: Any = model.config
    assert {part: getattr(parts, part)._attn_implementation for part in attentions} == attentions


def test_the_attention_of_a_part_is_set_for_the_whole() -> None:
    config = {"text_config": {**_TEXT, "attn_implementation": "eager"}}
    expected = r"not read .*; set model\.config\.attn_implementation={text_config: eager} instead$"
    with pytest.raises(SpecError, match=expected):
        architecture_model("Gemma3ForConditionalGeneration", config, torch.float32)


def test_it_has_no_backward() -> None:
    spec = _spec("GptOssForCausalLM", FUSED, 4, "prefill")
    with pytest.raises(SpecError, match="has no backward; leave out"):
        captured_graph(replace(spec, step=None, cache_len=None), "operator", None, "training")


def test_a_process_that_loads_a_stage_knows_the_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.fxpart.fused_attention(x, x, x, None, 1.0, True, 0.0, 0)
        return result

    x = torch.randn(1, 2, 3, 8)
    program = stage_program(torch.fx.symbolic_trace(attend), [x], "a stage")
    assert program.libraries == ("fxpart",)
    write_archive(program.exported, tmp_path / "stage.pt2")
    imported: list[str] = []
    monkeypatch.setattr(
        "fxpart.execution.stages.stage_archive.importlib.import_module", imported.append
    )
    module = read_archive(tmp_path / "stage.pt2", program.libraries)
    assert imported == [architecture_model.__module__.replace("architecture", "fused_attention")]
    torch.testing.assert_close(module(x), attend(x))
