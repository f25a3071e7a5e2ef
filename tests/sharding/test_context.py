"""Sequences shared by devices, each of which gathers all keys and values."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxpart.capture.models.build import build_model
from fxpart.errors import NotApplicableError, SpecError
from fxpart.sharding.context import positions_of
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.mesh import check_mesh
from runner.experiment.model_spec import model_spec
from runner.output.units import GIB
from tests.runner.composed import TINY_LLAMA, read
from tests.sharding.test_local_module import llama

LLAMA4 = {"num_hidden_layers": 1, "num_local_experts": 2}


def test_every_device_has_an_early_and_a_late_chunk() -> None:
    pieces = [positions_of(4, 2, rank).tolist() for rank in range(2)]
    assert pieces == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 18}, "use model.seq_len=16 or 20"),
        ({"seq_len": None}, "set model.seq_len to a multiple of 4"),
        ({"architecture": "MistralForCausalLM"}, "sees a window of 4096 tokens"),
        ({"architecture": "BertModel", "config": {}}, "is not a transformers decoder"),
        (
            {"architecture": "GPTJForCausalLM", "config": {"n_layer": 1}},
            "its own attention code",
        ),
        (
            {"architecture": "FalconForCausalLM", "config": {"num_hidden_layers": 1}},
            "its own attention code",
        ),
        ({"architecture": "Llama4ForCausalLM", "config": LLAMA4}, "sees chunks of 8192 tokens"),
        (
            {"architecture": "Qwen3_5ForCausalLM", "config": {"num_hidden_layers": 4}},
            "has such attention in 1 of 4 layers",
        ),
        (
            {"architecture": "FalconH1ForCausalLM", "config": {"num_hidden_layers": 1}},
            "has layers of kind hybrid",
        ),
    ],
)
def test_a_model_that_cannot_be_split_into_pieces_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(message)):
        build_model(replace(llama(1), context_parallel=2, **changes))  # type: ignore[arg-type]


def test_a_single_token_cannot_be_split() -> None:
    for phase in ("decode", "generate"):
        with pytest.raises(NotApplicableError, match="one token per sequence; use phase=prefill"):
            check_mesh(read(*TINY_LLAMA, "context_parallel=2", f"phase={phase}"))
    with pytest.raises(SpecError, match="context_parallel=0 must be 1 or more"):
        check_mesh(read(*TINY_LLAMA, "context_parallel=0"))


def test_devices_that_share_sequences_sum_gradients_and_shard_updates(tmp_path: Path) -> None:
    step = (*TINY_LLAMA, "phase=training", "mode=single", f"capture.cache_dir={tmp_path}")
    pieces = read(*step, "devices=2x16gb", "context_parallel=2", "zero=1")
    whole = read(*step, "devices=1x16gb")
    split, single = (plan(config, model_spec(config)) for config in (pieces, whole))
    values, config = headline(split), pieces.model.config
    assert split.replicas is not None
    assert split.replicas.parallel.n_replicas == 2
    assert split.evaluation.devices[0].peak_bytes < single.evaluation.devices[0].peak_bytes
    # Of each layer all keys and values: gathered, again for the backward, scattered.
    heads = int(config["num_key_value_heads"]) * int(config["hidden_size"])
    cache_bytes = heads // int(config["num_attention_heads"]) * int(pieces.model.seq_len or 0) * 2
    layers = int(config["num_hidden_layers"])
    assert values["collectives"] == 1 + 6 * layers
    graph = split.captured.graph
    trained_bytes = graph.weight_bytes[graph.gradient_weights].sum()
    inside = values["collective_gib"] * GIB - trained_bytes
    assert inside == pytest.approx(6 * layers * cache_bytes * pieces.model.batch_size)
    kinds = Counter(split.captured.graph.targets)
    for name in ("context_attention", "context_attention_backward"):
        assert kinds[f"fxpart.{name}.default"] == layers
    # Gathered values are copied into sequence order, gradients back into device order.
    assert kinds["fxpart.in_order.default"] == 4 * layers
    assert kinds["fxpart.by_device.default"] == 2 * layers
    # Everything except attention is halved; of attention each has half of the queries.
    assert split.captured.graph.flops.sum() * 2 == single.captured.graph.flops.sum()
    assert "context_parallel=2, 2 replicas, zero=1" in split.subject_line


def test_devices_fill_the_cache_of_a_prompt_piece_by_piece(tmp_path: Path) -> None:
    prompt = (*TINY_LLAMA, "phase=prefill", "mode=single", f"capture.cache_dir={tmp_path}")
    capacity = "context_len=64"  # more than the prompt needs, of which each device has half
    pieces = read(*prompt, "devices=2x16gb", "context_parallel=2", capacity)
    split, single = (
        plan(c, model_spec(c)) for c in (pieces, read(*prompt, "devices=1x16gb", capacity))
    )
    values, whole = headline(split), headline(single)
    assert values["kv_cache_gib"] == whole["kv_cache_gib"] > 0
    caches = [result.evaluation.devices[0].cache_bytes for result in (split, single)]
    assert caches[0] * 2 == caches[1]
    assert values["ttft_ms"] == values["latency_ms"]
    # Of each layer, keys and values of the prompt, whatever the capacity.
    config = pieces.model.config
    heads = int(config["num_key_value_heads"]) * int(config["hidden_size"])
    cache_bytes = heads // int(config["num_attention_heads"]) * int(pieces.model.seq_len or 0) * 2
    assert values["collectives"] == 2 * int(config["num_hidden_layers"])
    sent = values["collectives"] * cache_bytes * pieces.model.batch_size
    assert values["collective_gib"] * GIB == pytest.approx(sent)


def test_attention_on_one_device_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    result = torch.ops.fxpart.context_attention(*tensors, 0.5, True, 1, 0)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(result, expected)
    slope = torch.randn_like(result)
    for ours, by_torch in zip(
        torch.autograd.grad(result, tensors, slope),
        torch.autograd.grad(expected, tensors, slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, by_torch)
