"""Predictions for sharded models against gloo processes that run them with torch's own APIs."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.sharding.__main__ import LORA
from benchmarks.sharding.context_run import context_run, piece
from benchmarks.sharding.expert_run import expert_run, share_of
from benchmarks.sharding.group import run_group
from benchmarks.sharding.pipeline_run import (
    LOGITS_BYTES,
    PASSED_BYTES,
    pipeline_run,
    planned_pipeline,
    predicted_pipeline,
)
from benchmarks.sharding.predicted import predicted, predicted_zero
from benchmarks.sharding.tensor_run import Counted, tensor_run, whole_run
from benchmarks.sharding.zero_run import zero_run
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.context import split_context
from fxpart.sharding.experts import expert_paths, spread_experts
from fxpart.sharding.local_module import shard_module
from tests.sharding.test_experts import MIXTRAL
from tests.sharding.test_local_module import llama

pytestmark = pytest.mark.usefixtures("new_forkserver")

CPU = torch.device("cpu")
LONGER = replace(llama(1), seq_len=16)


def _small(name: str, architecture: str, seq_len: int, **config: int) -> ModelSpec:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    return ModelSpec(name, architecture, config=sizes | config, batch_size=2, seq_len=seq_len)


_LATENT = {
    "intermediate_size": 48,
    "v_head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
}
_EXPERTS = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    **{name: size for name, size in _LATENT.items() if name != "intermediate_size"},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
}
OTHERS = (
    # Scales what it looks up in its table.
    _small(
        "scaled", "Gemma2ForCausalLM", 8, num_key_value_heads=2, head_dim=8, intermediate_size=48
    ),
    # Latent attention: part of a key goes to all heads directly.
    _small("latent", "MiniCPM3ForCausalLM", 8, num_key_value_heads=4, **_LATENT),
    # Plans of our own: sinks of heads, gates that alternate with values, biases of experts.
    _small("sinks", "GptOssForCausalLM", 8, **_EXPERTS, num_key_value_heads=2, head_dim=8),
    _small("routed", "DeepseekV3ForCausalLM", 8, **_EXPERTS, **_ROUTED, num_key_value_heads=4),
)
"""Models whose plans have what a Llama's has not."""
FEW_KEYS = _small("few_keys", "Qwen2ForCausalLM", 8, num_key_value_heads=2, intermediate_size=48)
"""A model with fewer heads of keys than devices, and biases in their layers."""
SKIPPING = _small("skipping", "OPTForCausalLM", 16, ffn_dim=48, word_embed_proj_dim=32)
"""A model that calls its decoder without the forward of the module between them."""


def parts_run(rank: int, size: int, spec: ModelSpec) -> dict[str, Any]:
    """Run the captured part of this process; return its result, loss and gradients."""
    with seeded(0, CPU):
        built = build_model(replace(spec, sequence_parallel=False, loss_parallel=False), CPU)
    module = shard_module(
        built.module,
        size,
        rank,
        sequence=spec.sequence_parallel,
        loss_parallel=spec.loss_parallel,
    )
    labels = built.kwargs["input_ids"].clone()
    labels[0, 2] = -100
    items = labels[:, 1:].ge(0).sum() if spec.loss_parallel else None
    loss = module(**built.kwargs, labels=labels, num_items_in_batch=items)[0]
    loss.backward()
    with torch.no_grad():
        result = module(**built.kwargs)[0]
    gradients = {
        name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None
    }
    return {"result": result.numpy(), "loss": loss.item(), **gradients}


def assert_parts_of(whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Compare the tensors of each process with the whole: replicated, or split in one dimension."""
    for rank, part in enumerate(parts):
        assert part.keys() == whole.keys()
        for name, value in part.items():
            expected, shape = np.asarray(whole[name]), np.shape(value)
            differs = [i for i, n in enumerate(expected.shape) if n != shape[i]]
            for dim in differs:
                # Gates of experts and what they scale are split each, unless they alternate.
                is_packed = dim > 0 and name.endswith("gate_up_proj")
                halves = 2 if is_packed and "sinks" not in "".join(whole) else 1
                shares = [
                    np.split(half, len(parts), axis=dim)[rank]
                    for half in np.split(expected, halves, axis=dim)
                ]
                expected = np.concatenate(shares, axis=dim)
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def experts_run(
    rank: int, size: int, spec: ModelSpec, tensor: int = 1, *, sequence: bool = False
) -> dict[str, Any]:
    """Run this process's part of a mixture of experts on its examples; return the results.

    `tensor` neighbours have the same examples, and pieces of their sequences with `sequence`.
    """
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    module, inputs = built.module, share_of(built.kwargs, rank // tensor, size // tensor)
    aside = expert_paths(module)
    module = shard_module(module, tensor, rank % tensor, sequence=sequence, whole=aside)
    module = spread_experts(module, size, rank, same_tokens=1 if sequence else tensor)
    loss = module(**inputs, labels=inputs["input_ids"])[0]
    loss.backward()
    with torch.no_grad():
        result = module(**inputs)[0]
    gradients = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    return {"result": result.numpy(), **gradients}


def masked_run(rank: int, size: int, spec: ModelSpec) -> Any:  # noqa: ANN401
    """Return the forward results of a group whose devices run their experts on all tokens."""
    with seeded(0, CPU):
        built = build_model(spec, CPU)
    module = shard_module(built.module, size, rank, whole=expert_paths(built.module))
    module = spread_experts(module, size, rank, same_tokens=size, trains=False)
    with torch.no_grad():
        return module(**built.kwargs)[0].numpy()


def copied_keys_run(rank: int, size: int) -> npt.NDArray[np.float32]:
    """Return the forward results of a group in which several devices hold the same head of keys."""
    with seeded(0, CPU):
        built = build_model(FEW_KEYS, CPU)
        for layer in built.module.modules():
            if isinstance(layer, torch.nn.Linear) and layer.bias is not None:
                torch.nn.init.normal_(layer.bias)
    module = shard_module(built.module, size, rank, copies_keys=True)
    with torch.no_grad():
        result: npt.NDArray[np.float32] = module(**built.kwargs)[0].numpy()
    return result


def context_parts(rank: int, size: int, spec: ModelSpec) -> dict[str, Any]:
    """Run this process's pieces of sequences as captured; return the results."""
    with seeded(0, CPU):
        built = build_model(replace(spec, context_parallel=1), CPU)
    ids = built.kwargs["input_ids"]
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    module = split_context(built.module, size, rank)
    ids, local = (piece(t, rank, size) if size > 1 else t for t in (ids, targets))
    count = int((targets >= 0).sum())
    output = module(input_ids=ids, labels=ids, shift_labels=local, num_items_in_batch=count)
    output[0].backward()
    gradients = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    return {"result": output[1].detach().numpy(), **gradients}


def both(rank: int, size: int, spec: ModelSpec) -> tuple[Any, ...]:
    """Run the model on `parallelize_module` and `loss_parallel`, and on `fully_shard`, 2 and 3.

    Also a mixture of experts with the expert parallelism of transformers and with ours; and a model
    on pieces of sequences with plain `torch.distributed` and with ours.
    """
    in_pieces = tensor_run(rank, size, replace(spec, sequence_parallel=True))
    in_shards = replace(spec, sequence_parallel=True, loss_parallel=True)
    in_products = replace(spec, config={**spec.config, "attn_implementation": "eager"})
    return (
        [
            *[parts_run(rank, size, replace(spec, sequence_parallel=s)) for s in (False, True)],
            parts_run(rank, size, in_shards),
            parts_run(rank, size, replace(in_products, sequence_parallel=True)),
        ],
        ([parts_run(rank, size, other) for other in OTHERS], context_parts(rank, size, SKIPPING)),
        in_pieces,
        tensor_run(rank, size, _of_words(in_shards)),
        tensor_run(rank, size, spec),
        *[zero_run(rank, size, *sharded, ("adamw", None)) for sharded in _sharded(spec)],
        zero_run(rank, size, _of_gradients(spec), 3, ("none", "float32")),
        (expert_run(rank, size, MIXTRAL), experts_run(rank, size, MIXTRAL)),
        (context_run(rank, size, LONGER), context_parts(rank, size, LONGER)),
        (
            expert_run(rank, size, MIXTRAL, size),
            experts_run(rank, size, MIXTRAL, size),
            experts_run(rank, size, MIXTRAL, size, sequence=True),
            masked_run(rank, size, MIXTRAL),
        ),
    )


def _of_words(spec: ModelSpec) -> ModelSpec:
    """Return a model whose loss decides the peak of a step."""
    return replace(spec, config={**spec.config, "vocab_size": 4096})


def _of_gradients(spec: ModelSpec) -> ModelSpec:
    """Return a model in 16 bits whose gradients decide the peak of a step."""
    return replace(spec, dtype="bfloat16", batch_size=1)


def _sharded(spec: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """Return the models and stages of sharded steps: all weights trained, and adapters alone."""
    tuned = replace(spec, lora=LORA, config={**spec.config, "num_hidden_layers": 2})
    return [*product((spec, tuned), (2, 3))]


def stages_and_experts(rank: int, size: int) -> tuple[Any, ...]:
    """Run two stages of two replicas, and experts over two tensor-parallel groups."""
    counted = [pipeline_run(rank, size, 3, "1f1b", dtype) for dtype in (None, "float32")]
    experts = expert_run(rank, size, MIXTRAL, 2), experts_run(rank, size, MIXTRAL, 2)
    return counted, *experts, copied_keys_run(rank, size)


def test_llama_on_two_devices() -> None:
    spec = llama(1)
    forecast, whole = predicted(spec, tensor_parallel=2), whole_run(0, 1, spec)
    pieces = predicted(replace(spec, sequence_parallel=True), tensor_parallel=2)
    in_shards = replace(_of_words(spec), sequence_parallel=True, loss_parallel=True)
    shards, whole_words = predicted(in_shards, tensor_parallel=2), whole_run(0, 1, _of_words(spec))
    stages = [predicted_zero(step_spec, 2, stage, "adamw") for step_spec, stage in _sharded(spec)]
    runs = run_group(2, both, spec)
    for parts in zip(*(run[0] for run in runs), strict=True):
        assert_parts_of(parts_run(0, 1, spec), list(parts))
    _check_others([run[1] for run in runs])
    _check_experts([run[-3] for run in runs])
    _check_contexts([run[-2] for run in runs])
    _check_experts_of_one_group([run[-1] for run in runs])
    cast = predicted_zero(_of_gradients(spec), 2, 3, "none", "float32")
    for _, _, in_pieces, on_shards, split, *sharded, summed, _, _, _ in runs:
        assert summed.step_bytes == pytest.approx(cast.step_bytes, rel=0.02)
        assert Counter(summed.step_collectives) == cast.step_collectives
        comparisons = (
            (in_pieces, pieces, whole),
            (on_shards, shards, whole_words),
            (split, forecast, whole),
        )
        for counted, predicted_counts, reference in comparisons:
            assert counted.weight_bytes == predicted_counts.parameter_bytes
            assert counted.forward_bytes == pytest.approx(predicted_counts.forward_bytes, rel=0.02)
            assert counted.step_bytes == pytest.approx(predicted_counts.step_bytes, rel=0.02)
            assert Counter(counted.forward_collectives) == predicted_counts.forward_collectives
            assert Counter(counted.step_collectives) == predicted_counts.step_collectives
            assert counted.loss == pytest.approx(reference.loss, rel=1e-5)
            if counted is not on_shards:  # whose logits are shards
                np.testing.assert_allclose(counted.result, reference.result, atol=1e-5)
        for (step_spec, _), run, expected in zip(_sharded(spec), sharded, stages, strict=True):
            assert run.weight_bytes == expected.parameter_bytes
            assert run.step_bytes == pytest.approx(expected.step_bytes, rel=0.02)
            assert Counter(run.step_collectives) == expected.step_collectives
            # Before its first update; all replicas have the same examples here.
            assert step_spec.lora or run.loss == pytest.approx(whole.loss, rel=1e-5)


def test_stages_of_shards_and_groups_of_experts_on_four_devices() -> None:
    # Forwards that start with nothing gathered, the root, or all; backwards likewise.
    forecast = predicted_pipeline(3, "1f1b")
    both_runs = run_group(4, stages_and_experts)
    _check_experts_of_groups([run[1:3] for run in both_runs])
    for run in both_runs:
        np.testing.assert_allclose(run[3], copied_keys_run(0, 1), atol=1e-5)
    runs, cast_runs = ([run[0][i] for run in both_runs] for i in range(2))
    # In 16 bits, with gradients summed in 32.
    cast_forecast = predicted_pipeline(3, "1f1b", "float32")
    for stages, stage_runs in ((forecast, runs), (cast_forecast, cast_runs)):
        for expected, counted in zip((stages[0], *stages, stages[1]), stage_runs, strict=True):
            assert counted.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.02)
            assert counted.collectives == expected.collectives
    # The plan of a run, plus the buffers of torch's engine.
    plan = planned_pipeline(3, "1f1b")
    of_engine = (PASSED_BYTES, PASSED_BYTES + LOGITS_BYTES)
    for peak_bytes, more_bytes, counted in zip(plan.peak_bytes, of_engine, runs[::2], strict=True):
        assert counted.peak_bytes == pytest.approx(peak_bytes + more_bytes, rel=0.02)
    assert plan.shards is not None
    sums = [
        sum(
            n * size * (2 if kind == "all_gather" else 1) for (kind, size), n in collectives.items()
        )
        for collectives in (run.collectives for run in runs)
    ]
    assert plan.shards.collective_bytes == max(sums)
    assert plan.shards.collectives == max(run.collectives.total() for run in runs)
    # Each replica has its own microbatches.
    assert len({run.losses for run in runs[2:]}) == 2


def _check_others(runs: list[tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    """Check the parts of `OTHERS`, and the pieces of sequences of `SKIPPING`, against the whole."""
    for other, *parts in zip(OTHERS, *(parts for parts, _ in runs), strict=True):
        assert_parts_of(parts_run(0, 1, other), parts)
    logits = torch.from_numpy(context_parts(0, 1, SKIPPING)["result"])
    for rank, (_, ours) in enumerate(runs):
        np.testing.assert_allclose(ours["result"], piece(logits, rank, 2).numpy(), atol=1e-5)


@cache
def _whole_experts() -> tuple[Counted, dict[str, Any]]:
    return expert_run(0, 1, MIXTRAL), experts_run(0, 1, MIXTRAL)


def _check_contexts(runs: list[tuple[Counted, dict[str, Any]]]) -> None:
    """Check the predictions for gathered keys and values, and our results, against one process."""
    forecast = predicted(replace(LONGER, context_parallel=2))
    whole, expected = context_run(0, 1, LONGER), context_parts(0, 1, LONGER)
    logits = torch.from_numpy(whole.result)
    for rank, (counted, ours) in enumerate(runs):
        assert counted.weight_bytes == forecast.parameter_bytes
        assert counted.forward_bytes == pytest.approx(forecast.forward_bytes, rel=0.02)
        assert counted.step_bytes == pytest.approx(forecast.step_bytes, rel=0.02)
        assert Counter(counted.forward_collectives) == forecast.forward_collectives
        assert Counter(counted.step_collectives) == forecast.step_collectives
        for result in (counted.result, ours["result"]):
            np.testing.assert_allclose(result, piece(logits, rank, 2).numpy(), atol=1e-5)
    for name in expected.keys() - {"result"}:
        summed = sum(ours[name] for _, ours in runs)
        np.testing.assert_allclose(summed, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def _check_counted(counted: Counted, spec: ModelSpec, tensor: int = 1) -> None:
    """Check the predictions for `spec` against the counts of transformers' experts."""
    forecast = predicted(spec, tensor)
    assert counted.weight_bytes == forecast.parameter_bytes
    assert counted.forward_bytes == pytest.approx(forecast.forward_bytes, rel=0.02)
    assert counted.step_bytes == pytest.approx(forecast.step_bytes, rel=0.02)
    assert Counter(counted.forward_collectives) == forecast.forward_collectives
    assert Counter(counted.step_collectives) == forecast.step_collectives


def _check_experts_of_one_group(runs: list[tuple[Any, ...]]) -> None:
    """Check experts of a tensor-parallel group, whose devices have the same tokens, or pieces."""
    whole, expected = _whole_experts()
    _check_counted(runs[0][0], replace(MIXTRAL, expert_parallel=2), 2)
    for counted, _, _, masked in runs:
        np.testing.assert_allclose(counted.result, whole.result, atol=1e-5)
        np.testing.assert_allclose(masked, expected["result"], atol=1e-5)
    assert_parts_of(expected, [run[1] for run in runs])
    assert_parts_of(expected, [run[2] for run in runs])


def _check_experts_of_groups(runs: list[tuple[Counted, dict[str, Any]]]) -> None:
    """Check two tensor-parallel groups, each with its own examples, that share all experts."""
    whole, expected = _whole_experts()
    _check_counted(runs[0][0], replace(MIXTRAL, batch_size=2, expert_parallel=4), 2)
    for rank, (counted, _) in enumerate(runs):
        of_group = np.split(whole.result, 2)[rank // 2]
        np.testing.assert_allclose(counted.result, of_group, atol=1e-5)
    parts = [part for _, part in runs]
    for name in [name for name in expected if ".experts." in name]:
        joined = np.concatenate([part[name] for part in parts]) / 2
        np.testing.assert_allclose(joined, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    of_pairs = [
        {
            name: np.concatenate([a[name], b[name]])
            if name == "result"
            else (a[name] + b[name]) / 2
            for name in expected
            if ".experts." not in name
        }
        for a, b in zip(parts[:2], parts[2:], strict=True)
    ]
    assert_parts_of({name: expected[name] for name in of_pairs[0]}, of_pairs)


def _check_experts(runs: list[tuple[Counted, dict[str, Any]]]) -> None:
    """Check the predictions for transformers' experts, and our results, against one process."""
    (whole, expected_parts), parts = _whole_experts(), [part for _, part in runs]
    _check_counted(runs[0][0], replace(MIXTRAL, batch_size=2, expert_parallel=2))
    for rank, (counted, _) in enumerate(runs):
        expected = np.split(whole.result, 2)[rank]
        np.testing.assert_allclose(counted.result, expected, atol=1e-5)
    # Routers distribute tokens freely here; each loss is the mean over its own tokens.
    for name, expected in expected_parts.items():
        values = [part[name] for part in parts]
        if name == "result" or ".experts." in name:
            joined = np.concatenate(values) / (1 if name == "result" else 2)
        else:
            joined = np.mean(values, axis=0)
        np.testing.assert_allclose(joined, expected, rtol=1e-4, atol=1e-5, err_msg=name)
