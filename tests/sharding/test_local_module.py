"""The part of a model that one device of a group runs."""

import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_graph
from fxpart.core.topology import Link
from fxpart.cost.collective_times import (
    CollectiveGroup,
    TimesWithCollectives,
    collective_bytes,
    collective_kinds,
)
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import NotApplicableError, SpecError
from fxpart.sharding.local_module import shard_module
from fxpart.sharding.tensor_plan import tensor_plan
from tests.sketch import devices

CPU = torch.device("cpu")
HIDDEN, INNER, VOCABULARY, TOKENS = 64, 176, 256, 2 * 8


def llama(tensor_parallel: int, **config: int | str) -> ModelSpec:
    """Return a Llama with one layer."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
    }
    return ModelSpec(
        "llama",
        architecture="LlamaForCausalLM",
        config={**sizes, **config},
        batch_size=2,
        seq_len=8,
        tensor_parallel=tensor_parallel,
    )


def test_the_parts_of_a_llama_by_hand() -> None:
    whole, part = build_model(llama(1)).module, build_model(llama(2)).module
    split = {name: p.shape for name, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        expected = list(parameter.shape)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            expected[1] //= 2
        elif not name.endswith("norm.weight"):
            expected[0] //= 2
        assert list(split[name]) == expected, name


def test_devices_beyond_the_heads_of_keys_hold_copies() -> None:
    """Of 8 heads of queries and 4 of keys, each of 8 devices has one of either."""
    whole = build_model(llama(1), CPU).module
    path = "model.layers.0.self_attn"
    rows = {
        name: whole.get_parameter(f"{path}.{name}.weight").view(heads, HIDDEN // 8, HIDDEN)
        for name, heads in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))
    }
    for rank in range(8):
        part = shard_module(deepcopy(whole), 8, rank, copies_keys=True)
        for name, heads in rows.items():
            own = part.get_parameter(f"{path}.{name}.weight")
            assert torch.equal(own, heads[rank * len(heads) // 8])
        assert part.get_submodule(path).num_key_value_groups == 1


def test_fused_halves_of_experts_are_split_separately() -> None:
    """In Llama 4 columns are the last dimension: those of gates, then those that they scale."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    inner = {"intermediate_size": 4, "intermediate_size_mlp": 8, "num_local_experts": 3}
    config = {**sizes, **inner, "num_hidden_layers": 1, "vocab_size": 32, "pad_token_id": 0}
    spec = ModelSpec("llama4", "Llama4ForCausalLM", config=config, batch_size=2, seq_len=8)
    wholes, parts = (
        [p for _, p in build_model(replace(spec, tensor_parallel=n), CPU).module.named_parameters()]
        for n in (1, 2)
    )
    (whole,) = [p for p in wholes if p.shape == (3, 16, 8)]
    assert [p.shape for p in parts if p.dim() == 3] == [(3, 16, 4), (3, 2, 16)]
    owner = nn.Module()
    owner.packed = nn.Parameter(whole.detach().clone())
    shard_module(owner, 2, rank=1, plan={"packed": "packed_rowwise"})
    assert torch.equal(owner.packed, whole[..., [2, 3, 6, 7]])


def test_collectives_of_a_forward_and_of_a_step_by_hand() -> None:
    built = build_model(llama(2))
    graph = capture_graph(built.module, built.args, built.kwargs)
    hidden_bytes = TOKENS * HIDDEN * 4
    sums = [("all_reduce", hidden_bytes)] * 3  # the embedding, the attention, the MLP
    logits = [("all_gather", TOKENS * VOCABULARY * 4)]
    assert [
        (kind, collective_bytes(graph)[op]) for op, kind in collective_kinds(graph).items()
    ] == sums + logits
    labelled = {**built.kwargs, "labels": built.kwargs["input_ids"]}
    step = joint_graph(built.module, (), labelled)
    kinds = collective_kinds(step)
    backward = Counter(collective_bytes(step)[op] for op in kinds if step.is_backward[op])
    # A gradient for each of q, k, v, gate, up and the head, which all read replicated values.
    assert backward == {hidden_bytes: 6}
    assert len(kinds) == len(sums + logits) + 6


def test_a_collective_takes_the_time_of_the_group_ring() -> None:
    built = build_model(llama(2))
    graph = capture_graph(built.module, built.args, built.kwargs)
    topology = devices(10**9, 10**9)
    plain = LatencyModel().op_time_s(graph, topology)
    times = TimesWithCollectives(
        LatencyModel(), {"tensor": CollectiveGroup(2, (Link(1e6, 0.0), Link(1e3, 1.0)))}
    )
    seconds = times.op_time_s(graph, topology)
    kinds = collective_kinds(graph)
    summed = next(op for op, kind in kinds.items() if kind == "all_reduce")
    size_bytes = TOKENS * HIDDEN * 4
    assert seconds[summed].tolist() == pytest.approx([size_bytes / 1e6, size_bytes / 1e3 + 2.0])
    others = [op for op in range(graph.n_ops) if op not in kinds]
    assert (seconds[others] == plain[others]).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (llama(3), "num_attention_heads=8; use 2 or 4"),
        (replace(llama(8), loss="own"), "num_key_value_heads=4; use 4"),
        (llama(8, num_key_value_heads=3), "=3, or be a multiple of that; use 1"),
        (llama(4, intermediate_size=178), "gate_proj.weight, which has 178; use a divisor of 178"),
    ],
)
def test_degrees_that_do_not_divide_list_those_that_do(spec: ModelSpec, message: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(message)) as caught:
        build_model(spec)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(NotApplicableError, match=r"Linear has none.*or leave out tensor_parallel"):
        shard_module(nn.Linear(2, 2), 2)
    with pytest.raises(SpecError, match="tensor_parallel=0 must be a whole number"):
        llama(0)


def test_a_weight_that_is_whole_elsewhere_is_refused() -> None:
    def tied() -> nn.Module:
        table, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        head.weight = table.weight
        return nn.Sequential(table, head)

    with pytest.raises(NotApplicableError, match=r"0.weight is tied to a weight that the plan spl"):
        shard_module(tied(), 2, plan={"1": "colwise_gather_output"})
    both = {"0": "embedding_rowwise", "1": "colwise_gather_output"}
    module = shard_module(tied(), 2, plan=both)
    assert [p.shape for p in module.parameters()] == [(2, 2)]


def test_a_gathered_layer_beside_the_head_sees_no_pieces() -> None:
    module = build_model(llama(1)).module
    plan = {**tensor_plan(module), "model.layers.0.mlp.up_proj": "colwise_gather_output"}
    with pytest.raises(NotApplicableError, match="up_proj is colwise_gather_output, and no head"):
        shard_module(module, 2, plan=plan, sequence=True)


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="0 has the unknown style diagonal in the plan"):
        shard_module(nn.Sequential(nn.Linear(2, 2)), 2, plan={"0": "diagonal"})


def test_a_tied_weight_is_split_once() -> None:
    built = build_model(llama(2, tie_word_embeddings=True))
    head = built.module.get_submodule("lm_head").get_parameter("weight")
    embedding = built.module.get_submodule("model.embed_tokens").get_parameter("weight")
    assert head is embedding
    assert head.shape == (VOCABULARY // 2, HIDDEN)


def test_a_packed_weight_is_split_half_by_half() -> None:
    weight = torch.arange(8.0).reshape(8, 1)
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        layer = nn.Linear(1, 8, bias=False)
        layer.weight = nn.Parameter(weight)
        shard_module(nn.Sequential(layer), 2, rank, plan={"0": "packed_colwise"})
        assert layer.weight.flatten().tolist() == rows


def test_a_plan_with_experts_is_not_split_along_the_sequence() -> None:
    block = nn.ModuleDict({"gate": nn.Linear(4, 4), "experts": nn.Linear(4, 4)})
    with pytest.raises(NotApplicableError, match="plan of ModuleDict experts is moe_tp_experts"):
        shard_module(block, 2, plan={"experts": "moe_tp_experts"}, sequence=True)
    with pytest.raises(NotApplicableError, match="layer does not both begin by columns"):
        shard_module(block, 2, plan={"layer.gate": "colwise"}, sequence=True)


def test_a_window_of_a_sequence_in_pieces_is_refused() -> None:
    """Its mask would be made for the length of a piece, or left out if a piece fits into it."""
    spec = replace(llama(2, sliding_window=5), architecture="MistralForCausalLM")
    with pytest.raises(NotApplicableError, match=r"sees a window of 5 of the 8 tokens; set seq"):
        build_model(replace(spec, sequence_parallel=True))
    # A sequence that fits into the window is split.
    build_model(replace(spec, sequence_parallel=True, seq_len=4))
    wide = replace(llama(2, sliding_window=8), architecture="MistralForCausalLM")
    build_model(replace(wide, sequence_parallel=True))


def test_a_bidirectional_mask_is_not_treated_as_causal() -> None:
    spec = llama(2, attn_implementation="eager", pad_token_id=0)
    with pytest.raises(NotApplicableError, match="as products is not causal"):
        build_model(replace(spec, architecture="EuroBertForMaskedLM", sequence_parallel=True))


def test_only_losses_of_causal_language_models_are_split() -> None:
    with pytest.raises(NotApplicableError, match="Linear is not one; set loss_parallel=false"):
        shard_module(nn.Linear(2, 2), 2, plan={}, loss_parallel=True)


def test_only_the_head_stays_split_for_a_loss_of_shards() -> None:
    whole = build_model(llama(1)).module
    plan = tensor_plan(whole) | {"model.layers.0.mlp.up_proj": "colwise_gather_output"}
    part = shard_module(whole, 2, plan=plan, loss_parallel=True)
    hidden = torch.zeros(1, 8, HIDDEN, device="meta")
    assert part.get_submodule("model.layers.0.mlp.up_proj")(hidden).shape[-1] == INNER
    assert part.get_submodule("lm_head")(hidden).shape[-1] == VOCABULARY // 2


def test_a_loss_of_shards_needs_a_head_that_is_split() -> None:
    whole = build_model(llama(1)).module
    plan = {path: style for path, style in tensor_plan(whole).items() if path != "lm_head"}
    with pytest.raises(NotApplicableError, match="LlamaForCausalLM leaves lm_head whole"):
        shard_module(whole, 2, plan=plan, loss_parallel=True)
