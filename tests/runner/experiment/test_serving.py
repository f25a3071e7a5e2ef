"""Combinations with weights and caches of few bits, and the reasons of refusals."""

import re

import numpy as np
import pytest

from fxpart.cost.roofline import LatencyModel
from fxpart.errors import NotApplicableError, SpecError
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.serving import check_serving, latent_line, unfused_line
from tests.runner.composed import TINY_LLAMA, read


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            "phase=training",
            ("int8 is supported for serving, and for the frozen weights of finetune=lora"),
        ),
        (
            "latency=profiled",
            ("computed times, because no quantized kernels were measured; leave out latency="),
        ),
        ("execute=local", "random weights have the model's dtype; leave out execute=local"),
    ],
)
def test_each_refusal_has_its_own_reason(other: str, why: str) -> None:
    with pytest.raises(NotApplicableError, match=why):
        check_serving(read("weights=int8", other))


EXPERTS = (
    "model=mixtral_8x7b",
    "model.config={num_hidden_layers:1,hidden_size:64,intermediate_size:96,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:128,num_local_experts:8}",
    "reserve=none",
    "model.seq_len=16",
)


@pytest.mark.parametrize("phase", ["phase=decode", "phase=prefill"])
@pytest.mark.parametrize("model", [TINY_LLAMA, EXPERTS])
def test_replicas_have_weights_and_caches_of_few_bits(model: tuple[str, ...], phase: str) -> None:
    """Each moves as many bytes as a plan without replicas; of experts, those that are chosen."""
    few_bits = ("weights=int8", "kv_cache=fp8", "context_len=64", phase, "runtime=graph")
    one, two = (
        plan(config, model_spec(config))
        for config in (
            read(*model, *few_bits, "devices=1x16gb", "model.batch_size=1"),
            read(*model, *few_bits, "devices=2x16gb", "model.batch_size=2", "data_parallel=2"),
        )
    )
    assert two.problem.graph.moved_bytes.sum() == one.problem.graph.moved_bytes.sum()
    assert two.evaluation.latency_s == one.evaluation.latency_s
    (use,), (alone,) = two.evaluation.devices, one.evaluation.devices
    assert (use.weight_bytes, use.peak_bytes) == (alone.weight_bytes, alone.peak_bytes)
    assert use.cache_bytes == alone.cache_bytes > 0


def test_a_cache_of_fewer_bits_takes_less_time_by_what_is_read_less() -> None:
    def read_s(kv_cache: str) -> float:
        config = read(
            "model=gpt2",
            "model.config={n_layer:1,n_embd:1024,n_head:16,n_positions:8192,vocab_size:128}",
            *("phase=decode", "context_len=8000", "model.batch_size=64", "mode=single"),
            *("model.dtype=bfloat16", "devices=1xh100", f"kv_cache={kv_cache}", "runtime=graph"),
        )
        result = plan(config, model_spec(config))
        targets, seconds = result.problem.graph.targets, result.problem.costs.op_time_s[:, 0]
        return sum(float(seconds[op]) for op, name in enumerate(targets) if "attention" in name)

    # Half of the keys and values of 64 x 8001 tokens, at the curve's share of 3.35 TB/s.
    saved_s = read_s("auto") - read_s("fp8")
    assert 0.9 < 64 * 8001 * 2 * 1024 / 3.35e12 / saved_s < 1
    assert read_s("auto") == read_s("bf16")


def test_products_of_few_bits_take_the_roofline_with_a_note() -> None:
    config = read(
        "model=gpt2",
        "model.config={n_layer:1,n_embd:64,n_head:2,vocab_size:128}",
        *("phase=decode", "context_len=16", "mode=single", "devices=1xa100_80gb", "weights=int8"),
        "latency=kernels",
    )
    result = plan(config, model_spec(config))
    problem = result.problem
    is_few = np.array([target.startswith("int8.") for target in problem.graph.targets])
    latency = config.latency
    roofline = LatencyModel(
        latency.compute_efficiency, latency.bandwidth_efficiency, latency.op_overhead_s
    ).of_any_device()
    plain = roofline.op_time_s(problem.graph, problem.topology)[:, 0]
    times = problem.costs.op_time_s[:, 0]
    assert is_few.sum() == 4
    assert (times[is_few] == plain[is_few]).all()
    fused = [i for i, t in enumerate(problem.graph.targets) if "scaled_dot_product" in t]
    assert (times[fused] != plain[fused]).all()
    assert "a roofline for products of weights in int8" in result.times_note


def test_devices_of_split_layers_have_the_groups_of_their_part() -> None:
    def planned(*layout: str) -> dict[str, int]:
        config = read(
            *(*TINY_LLAMA, "phase=decode", "context_len=16", "mode=single"),
            *("devices=2x1gb", "tensor_parallel=2", *layout),
        )
        graph = plan(config, model_spec(config)).captured.graph
        sizes = zip(graph.weight_names, graph.weight_bytes.tolist(), strict=True)
        return {name.removeprefix("model.layers.0."): size for name, size in sizes}

    # Half of 64 rows of 64 numbers; half of the 64 columns of each of 64 rows: every row's scale.
    by_row = planned("weights=int8", "weights.row_bytes=4")
    assert by_row["self_attn.q_proj.weight"] == 32 * 64 + 32 * 4
    assert by_row["self_attn.o_proj.weight"] == 64 * 32 + 64 * 4
    # Half a byte per number, and four bytes for every eight of them.
    in_groups = planned("weights=int4", "weights.group_size=8", "weights.group_bytes=4")
    assert in_groups["self_attn.o_proj.weight"] == 64 * 32 // 2 + 64 * 32 // 8 * 4
    assert in_groups["mlp.down_proj.weight"] == 64 * 88 // 2 + 64 * 88 // 8 * 4
    with pytest.raises(SpecError, match=r"16 does not divide the 88 columns .*tensor_parallel=2"):
        planned("weights=int4", "weights.group_size=16")


_SERVED = (*TINY_LLAMA, "phase=decode", "context_len=16", "mode=single", "devices=1x1gb")


def _words(*overrides: str) -> list[str]:
    config = read(*_SERVED, *overrides)
    return plan(config, model_spec(config)).subject_line.split(", ")


def test_a_misspelt_module_to_keep_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SpecError, match=r"has o_projj, which is no module of .*; nearest: o_proj"):
        _words("weights=int8", "weights.keep=[lm_head,o_projj]")


@pytest.mark.parametrize(
    ("path", "change"), [("layers.0.mlp", "write mlp"), ("layers.0.o_projj", "nearest: o_proj")]
)
def test_a_path_to_keep_is_refused_since_single_names_are_matched(path: str, change: str) -> None:
    line = rf"has {path}, a path, but single names of modules are matched, in all layers; {change}"
    with pytest.raises(SpecError, match=line):
        _words("weights=int8", f"weights.keep=[{path}]")


def test_the_line_names_the_modules_that_keep_their_bits_and_other_bits() -> None:
    # This model has no router, which the shipped format keeps in others.
    assert "bfloat16 with weights in mxfp4 in groups of 32 except lm_head and self_attn" in _words(
        "weights=mxfp4", "model.config.intermediate_size=192"
    )
    assert "bfloat16 with weights in int8 of 6 bits except o_proj" in _words(
        "weights=int8", "weights.bits=6", "weights.keep=[o_proj]"
    )


def test_a_block_of_a_standard_has_one_size() -> None:
    with pytest.raises(SpecError, match=r"^weights.group_size=16 .* blocks have 32 numbers; leave"):
        check_serving(read("weights=mxfp4", "weights.group_size=16", "phase=decode"))
    check_serving(read("weights=nf4", "weights.group_size=16", "phase=decode"))


def test_the_line_has_the_format_and_the_length_of_the_cache() -> None:
    assert "decode against 16 tokens" in _words("context_len=null")
    assert "kv_cache=fp8" in _words("kv_cache=fp8")


_LATENT = (
    "model=transformers",
    "model.architecture=MiniCPM3ForCausalLM",
    "model.config={num_hidden_layers:3,hidden_size:64,intermediate_size:64,vocab_size:64,"
    "num_attention_heads:4,num_key_value_heads:4}",
    *("mode=single", "devices=1x16gb", "model.batch_size=1"),
)
_ABSORBED = ("latent_attention=absorbed",)


def test_products_of_latent_attention_with_the_whole_cache_are_named() -> None:
    """One for each layer: a decode of transformers projects all latents."""
    decode = read(*_LATENT, "phase=decode", "context_len=32")
    assert latent_line(decode, plan(decode, model_spec(decode)).problem).startswith("3 products of")
    prefill = read(*_LATENT, "phase=prefill", "model.seq_len=32")
    assert not latent_line(prefill, plan(prefill, model_spec(prefill)).problem)
    plain = read(*TINY_LLAMA, "phase=decode", "context_len=16", "mode=single")
    assert not latent_line(plain, plan(plain, model_spec(plain)).problem)


def test_attention_with_sinks_as_products_is_named() -> None:
    config = (
        "{num_hidden_layers:2,hidden_size:64,intermediate_size:64,vocab_size:64,"
        "num_attention_heads:4,num_key_value_heads:2,head_dim:16,num_local_experts:4}"
    )
    sinks = ("model=gpt_oss_20b", f"model.config={config}", "mode=single", "devices=1x16gb")
    prefill = read(*sinks, "phase=prefill", "model.seq_len=32")
    line = unfused_line(prefill, plan(prefill, model_spec(prefill)).problem)
    assert 10 < int(re.search(r"take (\d+)% of the operators' time", line)[1]) < 90  # type: ignore[index]
    fused = read(*sinks, "+model.config.attn_implementation=fused", "phase=decode", "context_len=8")
    assert not unfused_line(fused, plan(fused, model_spec(fused)).problem)
    alone = read(*sinks, "model.seq_len=32")
    assert not unfused_line(alone, plan(alone, model_spec(alone)).problem)


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_absorbed_latents_need_less_time_and_memory(weights: str) -> None:
    lengths = ("phase=generate", "prompt_len=48", "output_len=80", f"weights={weights}")
    expanded, absorbed = (
        plan(config, model_spec(config))
        for config in (read(*_LATENT, *lengths, *more) for more in ((), _ABSORBED))
    )
    assert absorbed.evaluation.latency_s < expanded.evaluation.latency_s
    assert absorbed.evaluation.peak_bytes < expanded.evaluation.peak_bytes
    assert absorbed.generation
    assert expanded.generation
    assert absorbed.generation.ttft_s == expanded.generation.ttft_s  # prompts are as they were
    use, whole = absorbed.evaluation.devices[0], expanded.evaluation.devices[0]
    assert (use.cache_bytes, use.weight_bytes) == (whole.cache_bytes, whole.weight_bytes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*_LATENT, "phase=decode", "latent_attention=absorb"),
            "does not exist; nearest: absorbed",
        ),
        ((*_LATENT, "phase=prefill", *_ABSORBED), "applies to a decode, got phase=prefill"),
        ((*_LATENT, "phase=decode", *_ABSORBED, "execute=local"), "leave out execute=local"),
        ((*_LATENT, "phase=decode", *_ABSORBED, "weights=nf4"), "leave out weights=nf4"),
    ],
)
def test_absorbed_latents_are_of_decodes_that_are_not_run(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_serving(read(*overrides))


def test_a_model_without_latents_has_none_to_absorb() -> None:
    config = read(*TINY_LLAMA, "phase=decode", "context_len=16", "mode=single", *_ABSORBED)
    with pytest.raises(SpecError, match="changes nothing, as the model caches no latents"):
        plan(config, model_spec(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("weights=none",), "activations=fp8 does not go with weights=none; weights=fp8 has"),
        (("weights=int8",), "activations=fp8 does not go with weights=int8; weights=fp8 has"),
        (
            ("weights=fp8", "phase=training", "finetune=lora"),
            "activations=fp8 casts the inputs of products in inference, got phase=training",
        ),
    ],
)
def test_inputs_in_8_bits_go_with_weights_in_8_bits_in_inference(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_serving(read(*TINY_LLAMA, "weights.activations=fp8", *overrides))


def test_inputs_in_8_bits_are_named() -> None:
    words = _words("weights=fp8", "weights.activations=fp8", "devices=1xh100", "reserve=cuda")
    assert "bfloat16 with weights in fp8 except lm_head with inputs in fp8" in words
