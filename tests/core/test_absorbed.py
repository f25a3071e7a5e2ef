"""Decodes with absorbed projections of latents."""

import pytest

from fxpart.capture.captured import captured_graph
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.absorbed import latent_projections, with_absorbed_latents
from fxpart.core.few_bits import with_cache_dtype
from fxpart.core.graph import OpGraph
from fxpart.cost.curves.shapes import shapes_of

_HEADS, _KEY, _ROTARY, _VALUE, _RANK = 4, 16, 8, 24, 32
_TEXTS, _TOKENS = 3, 64
_CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "vocab_size": 48,
    "q_lora_rank": 16,
    "kv_lora_rank": _RANK,
    "qk_nope_head_dim": _KEY,
    "qk_rope_head_dim": _ROTARY,
    "v_head_dim": _VALUE,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
}


def _captured(step: str, seq_len: int | None) -> OpGraph:
    spec = ModelSpec(
        "latent",
        "DeepseekV3ForCausalLM",
        config=_CONFIG,
        batch_size=_TEXTS,
        seq_len=seq_len,
        step=step,
        cache_len=_TOKENS,
        dtype="bfloat16",
    )
    return captured_graph(spec, "operator", None, step).graph


@pytest.fixture(scope="module")
def decode() -> OpGraph:
    return _captured("decode", None)


def test_projections_are_of_queries_and_results(decode: OpGraph) -> None:
    absorbed = with_absorbed_latents(decode)
    projections = latent_projections(decode)
    assert len(projections) == 2
    parts = _HEADS * (_KEY + _VALUE)
    # Weights, each query's and result's part of a head, and both with the size of a latent.
    rows = _TEXTS * _HEADS
    moved = 2 * (parts * _RANK + rows * (_KEY + _VALUE) + 2 * rows * _RANK)
    for op in projections:
        assert decode.flops[op] == 2 * _TEXTS * _TOKENS * parts * _RANK
        assert absorbed.flops[op] == 2 * _TEXTS * parts * _RANK
        assert absorbed.moved_bytes[op] == moved


def test_attention_reads_latents_and_positions_once(decode: OpGraph) -> None:
    absorbed = with_absorbed_latents(decode)
    (first, _), sizes = decode.attention[:, 0].tolist(), 2 * _RANK + _ROTARY
    assert absorbed.flops[first] == 2 * _TEXTS * _HEADS * _TOKENS * sizes
    cached = _TEXTS * _TOKENS * (_RANK + _ROTARY)
    mask = _TOKENS  # a byte each, the same for all texts
    queries_and_results = _TEXTS * _HEADS * sizes
    assert absorbed.moved_bytes[first] == 2 * (cached + queries_and_results) + mask
    assert not len(shapes_of(absorbed).attention_ops)


def test_a_cache_of_one_byte_halves_what_attention_reads(decode: OpGraph) -> None:
    half = with_absorbed_latents(with_cache_dtype(decode, "fp8"))
    absorbed = with_absorbed_latents(decode)
    (attention, _), (projection, _) = decode.attention[:, 0].tolist(), latent_projections(decode)
    assert half.moved_bytes[projection] == absorbed.moved_bytes[projection]
    saved = absorbed.moved_bytes[attention] - half.moved_bytes[attention]
    assert saved == _TEXTS * _TOKENS * (_RANK + _ROTARY)
    assert half.flops.tolist() == absorbed.flops.tolist()


def test_attention_stays_with_its_latents(decode: OpGraph) -> None:
    group = with_absorbed_latents(decode).group
    for projection, attention in zip(
        latent_projections(decode), decode.attention[:, 0].tolist(), strict=True
    ):
        assert len(set(group[projection : attention + 1].tolist())) == 1


def test_keys_and_values_take_no_memory_and_all_else_is_as_it_was(decode: OpGraph) -> None:
    absorbed = with_absorbed_latents(decode)
    changed = (decode.flops != absorbed.flops) | (decode.moved_bytes != absorbed.moved_bytes)
    assert {decode.modules[op].rpartition("self_attn")[1] for op in changed.nonzero()[0]} == {
        "self_attn"
    }
    expanded = _TEXTS * _TOKENS * _HEADS * (_KEY + _ROTARY + _VALUE) * 2
    assert decode.value_alloc_bytes.max() >= expanded // 2
    others = decode.value_is_cache | (decode.value_base >= 0)
    assert absorbed.value_alloc_bytes[~others].max() < expanded // 8
    assert (absorbed.value_bytes[others] <= decode.value_bytes[others]).all()
    assert absorbed.value_bytes[decode.value_is_cache].sum() == (
        decode.value_bytes[decode.value_is_cache].sum()
    )


def test_a_prefill_keeps_its_keys_and_values() -> None:
    prefill = _captured("prefill", _TOKENS)
    assert with_absorbed_latents(prefill) is prefill
