"""A training step of Megatron-LM: its kernels, sequence parallelism and float32 gradients."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.memory_case import peak_bytes
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.phases import StepOptions
from fxpart.cost.collective_times import collective_bytes, collective_kinds
from fxpart.errors import NotApplicableError, SpecError
from fxpart.execution.device import seeded
from fxpart.sharding import context, megatron
from fxpart.sharding.main_gradients import kept_gradient_bytes, with_main_gradients
from fxpart.sharding.megatron import as_megatron
from fxpart.sharding.zero import with_zero
from tests.sharding.test_experts import MIXTRAL
from tests.sharding.test_local_module import HIDDEN, INNER, TOKENS, VOCABULARY, llama

CPU = torch.device("cpu")


def _step(
    engine: str,
    tensor_parallel: int,
    dtype: str = "float32",
    checkpointing: str = "none",
    layers: int = 1,
) -> OpGraph:
    spec = replace(
        llama(tensor_parallel, num_hidden_layers=layers),
        engine=engine,
        sequence_parallel=tensor_parallel > 1,
        dtype=dtype,
    )
    built = build_model(spec)
    inputs = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    return joint_graph(built.module, (), inputs, StepOptions(checkpointing))


@pytest.fixture(scope="module")
def split_step() -> OpGraph:
    """Return the step of one of two devices."""
    return _step("megatron", 2)


LATENTS = ModelSpec(
    "deepseek",
    architecture="DeepseekV3ForCausalLM",
    config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 64,
        "experts_implementation": "grouped_mm",
    },
    batch_size=2,
    seq_len=8,
)
"""Latent attention, and experts in the second of two layers."""


def test_for_experts_one_gradient_of_each_shape_is_kept() -> None:
    built = build_model(replace(LATENTS, engine="megatron"))
    graph = joint_graph(built.module, (), {**built.kwargs, "labels": built.kwargs["input_ids"]})
    trained = {graph.weight_names[w] for w in graph.gradient_weights.tolist()}
    shapes = {n: list(p.shape) for n, p in built.module.named_parameters() if n in trained}
    in_blocks = [0, 0]
    for name, shape in shapes.items():
        if name.startswith("model.layers."):
            block = int(name.split(".")[2])
            in_blocks[block] += 4 * math.prod(shape[1:] if ".experts." in name else shape)
    home = np.array([int(path.startswith("model.layers.1")) for path in graph.modules])
    assert [kept_gradient_bytes(graph, home, device) for device in range(2)] == in_blocks
    attentions = [target for target in graph.targets if "context_attention" in target]
    assert len(attentions) == 2 * 2


PRODUCTS = replace(llama(1, attn_implementation="eager"), name="products")
GEMMA = replace(llama(1, head_dim=8, pad_token_id=0), name="gemma", architecture="GemmaForCausalLM")
"""Its norms multiply by 1 + weight."""


@pytest.mark.parametrize(
    "spec", [llama(1), PRODUCTS, LATENTS, MIXTRAL, GEMMA], ids=lambda spec: spec.name
)
def test_fused_kernels_reproduce_results_and_gradients_of_the_model(spec: ModelSpec) -> None:
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    module, inputs = built.module, {**built.kwargs, "labels": built.kwargs["input_ids"]}
    plain_loss, plain = _loss_and_gradients(module, inputs)
    fused_loss, fused = _loss_and_gradients(as_megatron(module), inputs)
    assert fused_loss == pytest.approx(plain_loss, rel=1e-6)
    assert len(plain) == len([p for p in module.parameters() if p.requires_grad])
    for own, gradient in zip(plain, fused, strict=True):
        np.testing.assert_allclose(gradient, own, atol=1e-6)


def _loss_and_gradients(
    module: nn.Module, inputs: Mapping[str, Any]
) -> tuple[float, list[np.ndarray]]:
    module.zero_grad()
    loss = module(**inputs)[0]
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return loss.item(), [gradient.numpy().copy() for gradient in gradients]


@pytest.mark.parametrize("attend", [megatron._attend, context._attend])
def test_an_attention_that_no_kernel_computes_is_refused(attend: Callable[..., Any]) -> None:
    heads = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotApplicableError, match="attention with softcap, s_aux has no kernel in"):
        attend(nn.Module(), heads, heads, heads, None, scaling=1.0, softcap=50.0, s_aux=heads)


def test_pieces_of_a_sequence_are_gathered_again_in_the_backward(split_step: OpGraph) -> None:
    kinds, sizes = collective_kinds(split_step), collective_bytes(split_step)
    hidden_bytes = TOKENS * HIDDEN * 4
    counted = Counter((kind, sizes[op]) for op, kind in kinds.items())
    # Embedding, attention and MLP end in a scatter, whose gradient is gathered; attention, MLP and
    # the head begin with a gather, which is repeated, and whose gradient is scattered.
    assert counted == {
        ("reduce_scatter", hidden_bytes): 6,
        ("all_gather", hidden_bytes): 9,
        ("all_reduce", HIDDEN * 4): 3,
    }
    # Outputs of the head stay split, and so does the gradient of the table.
    assert split_step.value_bytes.max() == VOCABULARY // 2 * HIDDEN * 4
    # Kept as in torch's engine: whole inputs of products, and logits.
    assert peak_bytes(split_step) < peak_bytes(_step("torch", 2))


def test_a_recomputed_block_gathers_its_pieces_again() -> None:
    kinds = Counter(collective_kinds(_step("megatron", 2, layers=2)).values())
    assert kinds == {"reduce_scatter": 10, "all_gather": 15, "all_reduce": 5}
    recomputed = Counter(collective_kinds(_step("megatron", 2, "float32", "block", 2)).values())
    # Per block: two gathers, and the scatter between them. The last scatter is not needed.
    assert recomputed == {"reduce_scatter": 10 + 2, "all_gather": 15 + 4, "all_reduce": 5}


def test_a_selective_checkpoint_keeps_scattered_sums() -> None:
    whole, selective = (
        Counter(collective_kinds(_step("torch", 2, "float32", checkpointing, 2)).values())
        for checkpointing in ("none", "selective")
    )
    assert selective["reduce_scatter"] == whole["reduce_scatter"]
    assert selective["all_gather"] == whole["all_gather"] + 4


def _long_step(checkpointing: str, layers: int) -> OpGraph:
    spec = replace(
        llama(2, num_hidden_layers=layers, attn_implementation="eager"),
        engine="megatron",
        sequence_parallel=True,
        dtype="bfloat16",
        seq_len=128,
    )
    built = build_model(spec)
    inputs = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    return joint_graph(built.module, (), inputs, StepOptions(checkpointing))


def test_selective_recomputation_keeps_no_scores_of_attention() -> None:
    """The contribution of a layer to the peak: Korthikanti et al., section 4, without dropout."""
    kept, recomputed = (
        [_long_step(checkpointing, n) for n in (2, 3)]
        for checkpointing in ("none", "core_attention")
    )
    of_layer = [peak_bytes(more) - peak_bytes(few) for few, more in (kept, recomputed)]
    # Probabilities of two texts, 4 of 8 heads per device.
    assert of_layer[0] - of_layer[1] == 2 * 4 * 128 * 128 * 2
    # Nothing is sent again, and no mask is created.
    assert len(collective_kinds(recomputed[0])) == len(collective_kinds(kept[0]))
    assert not any("triu" in target for target in kept[0].targets)


def test_gradients_are_accumulated_in_float32_and_sharded_by_zero() -> None:
    graph = _step("megatron", 1, "bfloat16")
    numbers = int(graph.weight_bytes[graph.gradient_weights].sum()) // 2
    main, value_of = with_main_gradients(graph)
    assert main.weight_state_bytes.sum() == 4 * numbers
    assert (main.value_bytes[value_of] == graph.value_bytes).all()
    assert peak_bytes(main) - 4 * numbers < peak_bytes(graph)
    optimizer = Optimizer("adamw", master_weights=True, main_gradients=True, implementation="fused")
    sharded = with_optimizer(with_zero(main, 1, 2).graph, optimizer)
    # The copy and two states, half of each, and a step count.
    steps_bytes = 4 * len(graph.gradient_weights)
    assert sharded.weight_state_bytes.sum() == numbers * (4 + 12 // 2) + steps_bytes
    assert not any(target.startswith("optimizer.cast") for target in sharded.targets)
    home = np.zeros(sharded.n_ops, dtype=np.int64)
    block_numbers = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * INNER + 2)
    assert kept_gradient_bytes(sharded, home, 0) == 2 * block_numbers
    assert kept_gradient_bytes(sharded, home, 1) == 0


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="Linear is not one; set engine=torch"):
        as_megatron(nn.Linear(2, 2))
    with pytest.raises(SpecError, match="engine=deepspeed: there are: megatron, torch"):
        replace(llama(1), engine="deepspeed")
