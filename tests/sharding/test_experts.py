"""Experts shared by devices, and the tokens that they exchange."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sharding.predicted import predicted
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import with_routed_share
from fxpart.core.topology import Link
from fxpart.cost.collective_times import (
    CollectiveGroup,
    TimesWithCollectives,
    collective_bytes,
    collective_kinds,
)
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import NotApplicableError
from runner.experiment.check import check_all
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.mesh import check_mesh
from runner.experiment.model_spec import model_spec
from runner.experiment.tensor_split import dealt_out
from tests.runner.composed import read
from tests.sharding.test_local_module import llama
from tests.sketch import devices

MIXTRAL = ModelSpec(
    "mixtral",
    architecture="MixtralForCausalLM",
    config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 64,
        "experts_implementation": "grouped_mm",
    },
    batch_size=4,
    seq_len=8,
)
"""With two experts per token."""
TINY = (
    "model=transformers",
    "model.architecture=MixtralForCausalLM",
    *(f"+model.config.{name}={value}" for name, value in MIXTRAL.config.items()),
    "model.dtype=float32",
    "model.seq_len=8",
    "mode=single",
)


def test_tokens_are_sent_to_their_experts_and_back() -> None:
    """2 x 8 tokens, each to two experts, 32 float32 numbers per row, and counts of 4 experts."""
    forecast = predicted(replace(MIXTRAL, batch_size=2, expert_parallel=2), 1)
    rows_bytes = 2 * 8 * 2 * 32 * 4
    there_and_back = Counter({("all_to_all", rows_bytes): 2, ("all_to_all", 4 * 8): 1})
    assert forecast.forward_collectives == there_and_back
    assert forecast.step_collectives - there_and_back == Counter({("all_to_all", rows_bytes): 2})


def test_a_busy_device_gets_more_rows_and_takes_longer() -> None:
    built = build_model(replace(MIXTRAL, batch_size=2, expert_parallel=2, expert_imbalance=1.25))
    graph = capture_graph(built.module, built.args, built.kwargs)
    size_bytes = 1.25 * 2 * 8 * 2 * 32 * 4
    groups = {"expert": CollectiveGroup(2, (Link(1e6, 0.0), Link(1e3, 1.0)))}
    seconds = TimesWithCollectives(LatencyModel(), groups).op_time_s(graph, devices(10**9, 10**9))
    exchanges = [op for op, to in enumerate(graph.targets) if to == "fxpart.all_to_all.rows"]
    assert [collective_bytes(graph)[op] for op in exchanges] == [size_bytes] * 2
    for op in exchanges:
        np.testing.assert_allclose(seconds[op], [size_bytes / 2e6, size_bytes / 2e3 + 1.0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            replace(MIXTRAL, expert_parallel=3),
            "the 4 experts of model.layers.0.mlp.experts; use 2 or 4",
        ),
        (replace(llama(1), expert_parallel=2), "LlamaForCausalLM has no plan"),
    ],
)
def test_a_model_without_suitable_experts_is_refused(spec: ModelSpec, message: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(message)):
        build_model(spec)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("expert_parallel=4",), "add data_parallel=4"),
        (("expert_parallel=3", "data_parallel=4"), "must divide the 4 experts; use 2 or 4"),
        (
            ("expert_parallel=3", "data_parallel=3", "tensor_parallel=2", "devices=6x16gb"),
            "must divide the 4 experts; use 2",
        ),
        (
            ("expert_parallel=1", "tensor_parallel=2", "devices=4x16gb", "expert_imbalance=2"),
            "use 1 without expert_parallel",
        ),
        (
            ("expert_parallel=4", "tensor_parallel=2", "devices=6x16gb", "data_parallel=3"),
            "over whole groups of tensor_parallel=2, of which there are 3; use 2",
        ),
        (
            ("expert_parallel=4", "tensor_parallel=2", "devices=2x16gb"),
            "over whole groups of tensor_parallel=2, of which there are 1; use 2",
        ),
        (("expert_parallel=2", "data_parallel=4", "zero=3"), "use expert_parallel=4, or zero=1"),
        (("expert_parallel=2", "data_parallel=2", "granularity=1"), "leave out granularity=1"),
        (("expert_parallel=2", "data_parallel=2", "expert_imbalance=3"), "from 1 to expert_par"),
        (("expert_imbalance=2",), "use 1 without expert_parallel"),
    ],
)
def test_incompatible_degrees_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises((NotApplicableError, ValueError), match=re.escape(message)):
        check_mesh(read(*TINY, *overrides))


def test_a_degree_is_refused_before_it_splits_the_batch() -> None:
    overrides = ("expert_parallel=3", "data_parallel=3", "devices=3x16gb", "model.batch_size=4")
    with pytest.raises(NotApplicableError, match="must divide the 4 experts"):
        check_all(read(*TINY, *overrides))


def test_replicas_sum_gradients_of_the_experts_they_share(
    tmp_path: Path,
) -> None:
    """Of four replicas two have each expert; ZeRO leaves each replica as much of their updates."""
    shared = (f"capture.cache_dir={tmp_path}", "all_reduce.gradient_as_bucket_view=true")
    replicas = ("devices=4x16gb", "data_parallel=4", "model.batch_size=4")
    base = (*TINY, *shared, *replicas, "phase=training")
    results = {}
    for degree, zero in ((2, 0), (4, 0), (2, 1), (4, 3)):
        config = read(*base, f"expert_parallel={degree}", f"zero={zero}")
        results[degree, zero] = plan(config, model_spec(config))
    graph = results[4, 0].captured.graph
    experts_bytes = 4 * 48 * 32 * 3 * 4
    sizes = dict(zip(graph.weight_names, graph.weight_bytes.tolist(), strict=True))
    dense_bytes = sum(sizes.values()) - experts_bytes // 4 - sizes["model.rotary_emb.inv_freq"]
    costs = {
        key: plan_result.replicas.cost
        for key, plan_result in results.items()
        if plan_result.replicas
    }
    summed = {key: cost.reduced_bytes.max() for key, cost in costs.items()}
    loss_bytes = summed[4, 0] - dense_bytes
    assert 0 <= loss_bytes <= 4
    assert summed[2, 0] == dense_bytes + experts_bytes // 2 + loss_bytes
    sent = costs[2, 0].sent_bytes.max()
    whole, half = (dense_bytes + loss_bytes) * 2 * 3 // 4, experts_bytes // 2
    assert sent == whole + half
    state = {key: results[key].captured.graph.weight_state_bytes.sum() for key in ((2, 1), (4, 3))}
    # Adam's two numbers per weight: a quarter for dense ones, half of a half for experts.
    assert state[2, 1] == pytest.approx(2 * (dense_bytes / 4 + experts_bytes / 4), rel=0.05)
    assert state[4, 3] == pytest.approx(state[2, 1], rel=0.05)
    gathered = results[2, 1].shards
    assert gathered is not None
    held_bytes = dense_bytes + experts_bytes // 2
    assert gathered.collective_bytes == pytest.approx(held_bytes, rel=0.05)  # rounded as allocated
    values = headline(results[4, 0])
    assert values["collectives"] == 5.0
    assert values["exposed_collective_ms"] == values["collective_ms"] > 0


def test_experts_use_the_links_of_all_groups_that_share_them() -> None:
    """With two nodes of 8: pairs for layers, four pairs of a node for experts, or all eight."""
    rates = {}
    for degree in (8, 16):
        degrees = ("tensor_parallel=2", "data_parallel=8", f"expert_parallel={degree}")
        config = read(*TINY, "devices=2x_dgx_h100", *degrees)
        for axis, group in dealt_out(config).exchanges.items():
            assert group.size == (2 if axis == "tensor" else degree)
            rates[axis, degree] = group.links[0].bytes_per_s
    assert rates["tensor", 8] == rates["tensor", 16] == rates["expert", 8] == 450e9
    assert rates["expert", 16] == 50e9


def test_experts_skip_the_rows_of_other_devices() -> None:
    """Of 4 x 8 tokens with two experts each, half belong to the two experts here."""
    built = build_model(replace(MIXTRAL, tensor_parallel=2, expert_parallel=2))
    graph = capture_graph(built.module, built.args, built.kwargs)
    assert [collective_kinds(graph)[op] for op in collective_kinds(graph)].count("all_to_all") == 0
    products = [op for op, name in enumerate(graph.targets) if "grouped_mm" in name]
    rows, offsets_bytes = 4 * 8 * 2, 2 * 4
    sizes = {"up": (32, 2 * 48), "down": (48, 32)}
    for share, multiplied, experts in ((1.0, 64, 2), (0.5, 32, 2), (1 / 64, 1, 1)):
        shared = with_routed_share(graph, share)
        for op, (columns, n_results) in zip(products, sizes.values(), strict=True):
            assert shared.flops[op] == 2 * multiplied * columns * n_results
            row_bytes = 4 * (columns + n_results) * multiplied + offsets_bytes * multiplied // rows
            assert shared.moved_bytes[op] == row_bytes + 4 * columns * n_results * experts


def test_a_token_is_decoded_by_the_experts_of_a_group(tmp_path: Path) -> None:
    """Each device has half of the heads, of the cache and of the experts; an all-reduce sums up."""
    serving = (*TINY, "phase=decode", "context_len=16", f"capture.cache_dir={tmp_path}")
    split = ("devices=2xh100", "tensor_parallel=2", "expert_parallel=2")
    results = [plan(c, model_spec(c)) for c in (read(*serving, *split), read(*serving))]
    grouped, single = map(headline, results)
    assert grouped["kv_cache_gib"] == single["kv_cache_gib"] == 2 * 2 * 8 * 16 * 4 / 2**30
    # Embedding, attention and experts are all-reduced, the scores gathered.
    kinds = collective_kinds(results[0].captured.graph)
    assert Counter(kinds.values()) == Counter(all_reduce=3, all_gather=1)
    assert grouped["tpot_ms"] == grouped["latency_ms"]
    sizes = [result.evaluation.devices[0].weight_bytes for result in results]
    assert sizes[0] < 0.6 * sizes[1]
    products = [name for name in results[0].captured.graph.targets if "grouped_mm" in name]
    flops = [
        r.captured.graph.flops[[t in products for t in r.captured.graph.targets]].sum()
        for r in results
    ]
    assert flops[0] * 2 == flops[1] > 0
