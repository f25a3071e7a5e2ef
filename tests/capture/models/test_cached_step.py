"""Steps with a cache, against generation by transformers, with one model for each kind of cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, GPT2Config, GPT2LMHeadModel

from fxpart.capture.api import capture_graph
from fxpart.capture.captured import captured_graph
from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.build import build_model
from fxpart.capture.models.cached_step import fill_counters, prepare_step
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.graph import CACHE
from fxpart.cost.collective_times import collective_kinds
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError, SpecError
from fxpart.execution.local import run_local
from fxpart.execution.real_model import real_model
from tests.execution.scene import in_a_row

_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
# Torch's own kernel decomposes its products here, with copies that no graph has.
_BY_PRODUCTS = {"attn_implementation": "eager"}
_LATENT = {
    **_BY_PRODUCTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_WINDOW = ["sliding_attention", "full_attention"]
_PART = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_T5 = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8, "vocab_size": 1024}
_SOUND = {
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in _PART.items()},
    "d_model": 32,
    "vocab_size": 1024,
    "num_mel_bins": 8,
    "max_source_positions": 30,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "decoder_start")},
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
# Images have fewer positions than the cache has places.
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_IMAGES = {
    "text_config": {"model_type": "llama", **_TEXT},
    "vision_config": {"model_type": "clip_vision_model", **_EYES},
    "image_token_id": 1023,
}
_KINDS: dict[str, tuple[str, Mapping[str, object]]] = {
    "all heads": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 1024}),
    "groups of queries": ("LlamaForCausalLM", _TEXT),
    "experts": ("MixtralForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "windows": (
        "Gemma3ForCausalLM",
        {**_TEXT, "head_dim": 8, "sliding_window": 6, "layer_types": _WINDOW},
    ),
    "a latent": ("DeepseekV3ForCausalLM", {**_TEXT, **_LATENT}),
    "linear attention": ("Qwen3NextForCausalLM", {**_TEXT, **_LINEAR}),
    "a state space": (
        "MambaForCausalLM",
        {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 1024, "state_size": 8},
    ),
    "a recurrence": (
        "RwkvForCausalLM",
        {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 1024},
    ),
    "a text beside images": ("LlavaForConditionalGeneration", _IMAGES),
    "an encoder": ("T5ForConditionalGeneration", _T5),
    "an encoder of sound": ("WhisperForConditionalGeneration", _SOUND),
}
_WITH_ENCODER = ("an encoder", "an encoder of sound")
_PROMPT = 9


def _spec(kind: str, **fields: object) -> ModelSpec:
    architecture, config = _KINDS[kind]
    usual = {"batch_size": 2, "seq_len": _PROMPT, "step": "decode", "cache_len": _PROMPT + 1}
    return ModelSpec("m", architecture=architecture, config=config, **{**usual, **fields})  # type: ignore[arg-type]


def _generated(model: Any, inputs: dict[str, Tensor]) -> Any:  # noqa: ANN401 - untyped upstream
    """Return what transformers generates after a prompt: two tokens, and its cache."""
    model.generation_config.eos_token_id = None
    prompt: dict[str, Any] = {
        name: tensor for name, tensor in inputs.items() if name in ("input_ids", "input_features")
    }
    # Whisper's own method looks for language tokens before it calls this one.
    return GenerationMixin.generate(
        model,
        **prompt,
        max_new_tokens=2,
        do_sample=False,
        use_cache=True,
        cache_implementation="static",
        pad_token_id=0,
        decoder_start_token_id=0,
        return_dict_in_generate=True,
    )


def _tensor_bytes(kept: object) -> int:
    """Return the bytes of all tensors of a transformers cache except its token counts."""
    match kept:
        case Tensor():
            return kept.nbytes if kept.dim() else 0
        case dict():
            return sum(_tensor_bytes(item) for item in kept.values())
        case list():
            return sum(_tensor_bytes(item) for item in kept)
    module = type(kept).__module__
    return _tensor_bytes(vars(kept)) if module == "transformers.cache_utils" else 0


@pytest.mark.parametrize("kind", _KINDS)
def test_a_prefill_and_a_decode_reproduce_tokens_and_cache_of_generate(kind: str) -> None:
    is_encoded = kind in _WITH_ENCODER
    spec = _spec(kind, cache_len=2 if is_encoded else _PROMPT + 1)
    torch.manual_seed(0)
    built = build_model(replace(spec, step="prefill"), torch.device("cpu"))
    module: Any = built.module  # of transformers, which is untyped
    inputs = built.kwargs
    for name, tensor in inputs.items():
        if name.startswith(CACHE):
            tensor.zero_()
    if is_encoded:
        inputs["decoder_input_ids"].zero_()
    with torch.no_grad():
        first = module(**inputs)[:, -1:].argmax(-1)
        decode = prepare_step(module, spec)
        second = {name: inputs.get(name, like) for name, like in decode.items()}
        second["decoder_input_ids" if is_encoded else "input_ids"] = first
        if is_encoded:
            second["encoder_states"] = module.get_encoder()(inputs[module.main_input_name])[0]
        token = module(**second)[:, -1:].argmax(-1)
        del module.forward
        own = _generated(module, inputs)
    assert torch.equal(torch.cat([first, token], 1), own.sequences[:, -2:])
    cache_bytes = sum(tensor.nbytes for name, tensor in decode.items() if name.startswith(CACHE))
    kept = own.past_key_values if hasattr(own, "past_key_values") else own[1]
    assert cache_bytes == _tensor_bytes(kept) > 0


# The cache of experts is that of groups of queries.
@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind != "experts"])
def test_the_memory_of_a_decode_is_predicted_and_a_split_one_agrees(kind: str) -> None:
    real = real_model(_spec(kind))
    inputs = real.kwargs
    weights = {**dict(real.module.named_parameters()), **dict(real.module.named_buffers())}
    # The encoder is not run in a decode, nor is its output an input: the cache has what is read.
    used = [weights[name] for name in real.graph.weight_names if name in weights]
    read = {real.graph.value_names[value] for value in real.graph.reads.tolist()}
    used += [tensor for name, tensor in inputs.items() if name in read]
    resident = storage_sizes(used)
    with torch.no_grad(), LiveBytes([resident]) as counter:
        real.module(**inputs)
    fill_counters(inputs, "decode", _PROMPT + 1)
    graph = capture_graph(real.module, (), inputs)
    predicted = peak_bytes(memory_tables(graph), np.zeros(graph.n_ops, np.int64), 1)
    assert predicted[0] == pytest.approx(counter.peak_bytes[0], rel=0.01)
    run = run_local(real, in_a_row(real.graph, 2), 2, repeats=1)
    assert run.max_difference == 0.0


def test_a_decode_reads_no_image() -> None:
    text = {**_TEXT, "model_type": "gemma", "head_dim": 8}
    images = {**_EYES, "model_type": "siglip_vision_model"}
    config = {"text_config": text, "vision_config": images, "projection_dim": 32}
    usual = ModelSpec("m", architecture="PaliGemmaForConditionalGeneration", config=config)
    decode = replace(usual, seq_len=12, step="decode", cache_len=20)
    names = [set(build_model(spec).kwargs) for spec in (usual, replace(decode, step="prefill"))]
    assert all({"input_ids", "pixel_values"} <= inputs for inputs in names)
    built = build_model(decode)
    uncached = [name for name in built.kwargs if not name.startswith((CACHE, "cached_"))]
    assert uncached == ["input_ids"]
    graph = captured_graph(decode, "operator", None).graph
    assert not any("vision_tower" in name for name in graph.weight_names)
    # It stays beside what is read.
    assert any("vision_tower" in name for name in graph.unread_weight_names)
    stored = storage_sizes([*built.module.parameters(), *built.module.buffers()])
    assert graph.total_weight_bytes + graph.unread_weight_bytes.sum() == sum(stored.values())


def test_a_cache_stays_with_the_layer_that_writes_one_row() -> None:
    graph = captured_graph(_spec("groups of queries"), "operator", None).graph
    for value in np.flatnonzero(graph.value_is_cache):
        readers = graph.readers[graph.reads == value]
        assert len(set(graph.group[readers].tolist())) == 1
        layer = graph.value_names[value].removeprefix(CACHE).partition("_")[0]
        assert {graph.modules[op] for op in readers} == {f"model.layers.{layer}.self_attn"}

    writes = [op for op, name in enumerate(graph.targets) if "index_copy_" in name]
    # The row of 2 texts, 2 heads and 8 numbers is read and written, its position is read.
    assert graph.moved_bytes[writes].tolist() == [2 * (2 * 2 * 8 * 4) + 8] * 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ModelSpec("m", architecture="BertForMaskedLM", step="decode"),
            "BertForMaskedLM has no cache, so there is nothing to decode against",
        ),
        (
            _spec("all heads", cache_len=2000),
            "a cache of 2000 tokens is more than the 1024 positions of GPT2LMHeadModel; set",
        ),
        (_spec("all heads", cache_len=1), "leaves no token before the one that is decoded"),
        (_spec("all heads", step="prefill", cache_len=4), "a prompt of 9 tokens is longer than"),
    ],
)
def test_a_model_that_cannot_decode_is_refused(spec: ModelSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        captured_graph(spec, "operator", None)


def test_a_prompt_without_a_length_fills_the_cache() -> None:
    spec = _spec("all heads", step="prefill", seq_len=None, cache_len=100)
    inputs = build_model(spec).kwargs
    assert inputs["input_ids"].shape == (2, 100)
    assert inputs[f"{CACHE}0_keys"].shape[2] == 100


def test_in_a_split_decode_each_device_keeps_its_own_heads() -> None:
    spec = _spec("groups of queries")
    whole, part = (build_model(replace(spec, tensor_parallel=n)) for n in (1, 2))
    names = [name for name in whole.kwargs if name.startswith(CACHE)]
    assert len(names) == 4
    for name in names:
        assert 2 * part.kwargs[name].nbytes == whole.kwargs[name].nbytes
    graph = capture_graph(part.module, part.args, part.kwargs)
    # The embedding, and for each layer the attention and the MLP; then the scores are gathered.
    expected = ["all_reduce"] * 5 + ["all_gather"]
    assert list(collective_kinds(graph).values()) == expected


def test_a_factory_has_no_known_cache() -> None:
    with pytest.raises(SpecError, match=r"phase=decode needs the cache of a transformers model"):
        ModelSpec("m", factory="a:b", step="decode")


def _changed(kind: str, settings: Mapping[str, object], **fields: object) -> ModelSpec:
    spec = _spec(kind, **fields)
    return replace(spec, config={**spec.config, **settings})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            _changed("linear attention", {"num_experts_per_tok": 10}),
            r"^the forward of Qwen3NextForCausalLM fails: .*; it may choose more experts than"
            r" there are, .*: num_experts_per_tok=10, num_experts=4; set them as"
            r" model.config.NAME$",
        ),
        (
            _changed("linear attention", {"num_experts_per_tok": 10}, step=None, cache_len=None),
            r"torch.export: .*; it may choose more experts than there are",
        ),
        (
            _spec("all heads", batch_size=2 * 10**16),
            r"^the forward of GPT2LMHeadModel fails: .*; a tensor would have more bytes than"
            r" torch can count; set a smaller model.batch_size$",
        ),
        (
            _changed("groups of queries", {"num_key_value_heads": 3}),
            r"^the forward of LlamaForCausalLM fails, without a cache too: .*; its configuration,"
            r" model.config, may be the cause$",
        ),
        (
            _changed("experts", {"intermediate_size": 60}, dtype="bfloat16"),
            r"multiple of 16 bytes; set model.config.intermediate_size=64$",
        ),
    ],
)
def test_the_cache_is_not_blamed_for_what_fails_without_it(spec: ModelSpec, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured_graph(spec, "operator", None)


torch.library.define("tests_cached_step::positive", "(Tensor tokens) -> Tensor")
torch.library.impl("tests_cached_step::positive", "cpu", lambda tokens: tokens > 0)


class _Calls(GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """A model that calls an operator of which fake tensors do not know the result."""

    operator: Any

    def forward(
        self, input_ids: Tensor, past_key_values: object = None, use_cache: object = None
    ) -> Tensor:
        result: Tensor = self.operator(input_ids)
        return result


@pytest.mark.parametrize("operator", [torch.nonzero, torch.ops.tests_cached_step.positive])
def test_what_fake_tensors_cannot_do_is_no_fault_of_the_model(operator: object) -> None:
    spec = _spec("all heads")
    with torch.device("meta"):
        model = _Calls(GPT2Config(n_layer=1, n_embd=32, n_head=4))
    model.operator = operator
    with pytest.raises(CaptureError, match=r"^_Calls cannot be captured with a static cache"):
        prepare_step(model, spec)
