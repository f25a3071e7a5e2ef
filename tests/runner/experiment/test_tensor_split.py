"""Tensor parallelism in a run."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.core.data_parallel import split_topology
from fxpart.cost.collective_times import collective_kinds
from fxpart.errors import InfeasibleError, NotApplicableError, SpecError
from runner.experiment.check import check
from runner.experiment.degrees import check_tensor_degree
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.experiment.tensor_split import check_split, dealt_out, split_line
from runner.experiment.training import check_training, optimizer_of
from runner.experiment.whole_modules import carrier_line
from runner.experiment.zero import check_zero, zero_line
from runner.job.job import _show_plan
from runner.output.units import GIB
from tests.runner.composed import TINY_LLAMA, read


def _planned(*overrides: str) -> Result:
    config = read(*TINY_LLAMA, *overrides)
    return plan(config, model_spec(config))


def test_a_group_shares_weights_and_waits_for_its_collectives() -> None:
    whole = _planned("mode=single", "devices=1x16gb")
    split = _planned("mode=single", "devices=4x16gb", "tensor_parallel=4")
    values = headline(split)
    assert values["devices_used"] == values["tensor_parallel"] == 4.0
    assert values["weights_gib"] == pytest.approx(headline(whole)["weights_gib"] / 4, rel=0.02)
    # Three sums of 16 x 64 bfloat16 numbers; one of 16 x 256, the logits.
    moved_bytes = 3 * 2048 + 8192
    assert values["collectives"] == 4.0
    assert values["collective_gib"] * GIB == pytest.approx(moved_bytes)
    link = read(*TINY_LLAMA).transfer_rate
    sums_s = 3 * 6 * (2048 / 4 / link.bytes_per_s + link.latency_s)
    gather_s = 3 * (8192 / 4 / link.bytes_per_s + link.latency_s)
    assert values["collective_ms"] == pytest.approx((sums_s + gather_s) * 1e3)
    assert values["exposed_collective_ms"] == values["collective_ms"]
    assert 0 < values["collective_ms"] < values["latency_ms"]
    assert split.captured.graph.flops.sum() * 4 == whole.captured.graph.flops.sum()
    assert split.split is not None
    assert split_line(split.split).startswith("1 group of 4 devices; 4 collectives of 14.00 KiB")
    assert "parameters a device" in split.subject_line


def test_a_line_with_several_groups_names_the_busiest() -> None:
    split = _planned("mode=pipeline", "devices=4x16gb", "tensor_parallel=2").split
    assert split is not None
    # One of the two has the attention's sum, or the head's; both have some of the 4 collectives.
    assert split.collectives < 4
    line = split_line(split)
    assert line.startswith(f"2 groups of 2 devices; {split.collectives} collective")
    assert " of the busiest group take" in line


def test_collectives_are_those_of_all_microbatches() -> None:
    groups = ("devices=2x16gb", "tensor_parallel=2", "mode=single")
    once, step = _planned(*groups), _planned(*groups, "schedule=gpipe", "microbatches=3")
    single, all_of_them = headline(once), headline(step)
    for name in ("collectives", "collective_gib", "collective_ms", "exposed_collective_ms"):
        assert all_of_them[name] == pytest.approx(3 * single[name])
    assert all_of_them["latency_ms"] == single["latency_ms"]
    assert step.split is not None
    assert "; 12 collectives of 42.00 KiB in 3 microbatches take" in split_line(step.split)


def test_a_loss_of_shards_sums_numbers_of_positions_instead_of_gathering_logits() -> None:
    groups = ("devices=2x16gb", "tensor_parallel=2", "mode=single")
    step = (*groups, "phase=training", "optimizer=none", "model.seq_len=256")
    gathered, shards = (_planned(*step, f"loss_parallel={on}") for on in ("false", "true"))
    kinds = [
        Counter(collective_kinds(result.captured.graph).values()) for result in (gathered, shards)
    ]
    assert kinds[1] - kinds[0] == Counter(all_reduce=3)
    assert kinds[0] - kinds[1] == Counter(all_gather=1)
    # One gather of 256 x 256 bfloat16 logits, and three sums of 256 float32 numbers.
    difference = headline(gathered)["collective_gib"] - headline(shards)["collective_gib"]
    assert difference * GIB == pytest.approx(2 * 256 * 256 - 3 * 4 * 256)
    assert shards.evaluation.devices[0].peak_bytes < gathered.evaluation.devices[0].peak_bytes
    assert "loss_parallel=true" in shards.subject_line


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("tensor_parallel=1", "tensor_parallel=2 or more"),
        ("phase=inference", "phase=training"),
        ("engine=megatron", "engine=torch"),
        ("model.loss=mean", "model.loss=own"),
    ],
)
def test_a_loss_of_shards_needs_shards_and_a_loss(override: str, needed: str) -> None:
    step = ("devices=2x16gb", "tensor_parallel=2", "phase=training", "loss_parallel=true")
    message = f"got {override}; use {needed}, or loss_parallel=false"
    with pytest.raises(NotApplicableError, match=re.escape(message)):
        check_split(read(*TINY_LLAMA, *step, override))


def test_a_piece_of_the_sequence_is_kept_between_layers() -> None:
    groups = ("devices=4x16gb", "data_parallel=2", "tensor_parallel=2", "model.batch_size=4")
    step = (*groups, "phase=training", "mode=single", "optimizer=none")
    whole, pieces = (_planned(*step, f"sequence_parallel={on}") for on in ("false", "true"))
    assert pieces.evaluation.devices[0].peak_bytes < whole.evaluation.devices[0].peak_bytes
    # Of embedding, attention, MLP and head: a gather or a scatter forward, its counterpart
    # backward, two of each for attention and MLP; the logits; the weights of three norms.
    kinds = Counter(collective_kinds(pieces.problem.graph).values())
    assert kinds == {"reduce_scatter": 6, "all_gather": 6 + 1, "all_reduce": 3}
    assert "sequence_parallel=true" in pieces.subject_line


def test_a_split_sequence_requires_a_group_and_whole_sequences() -> None:
    for overrides, message in (
        (("sequence_parallel=true",), "got tensor_parallel=1; add tensor_parallel=2"),
        (("sequence_parallel=true", "tensor_parallel=2", "phase=decode"), "got phase=decode"),
    ):
        with pytest.raises(NotApplicableError, match=message):
            check_split(read(*TINY_LLAMA, *overrides))
    with pytest.raises(NotApplicableError, match=r"use model\.seq_len=16 or 18"):
        _planned(
            "sequence_parallel=true", "tensor_parallel=2", "model.seq_len=17", "devices=2x16gb"
        )


def test_a_pipeline_has_groups_as_stages() -> None:
    result = _planned("mode=pipeline", "devices=4x16gb", "tensor_parallel=2")
    assert len(result.evaluation.devices) == 2
    assert headline(result)["devices_used"] == 4.0


def test_replicas_of_groups_sum_the_gradients_of_their_shards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (
        "phase=training",
        "mode=single",
        "model.batch_size=2",
        "optimizer=none",
    )
    groups = ("devices=4x16gb", "tensor_parallel=2", "data_parallel=2")
    result = _planned(*options, *groups)
    values = headline(result)
    assert (values["data_parallel"], values["devices_used"]) == (2.0, 4.0)
    _show_plan(read(*TINY_LLAMA, *options, *groups), result)
    assert "replicas:  2 replicas of 2 devices; " in capsys.readouterr().out
    assert result.replicas is not None
    # Like experts over the devices of one group.
    parallel = split_topology(result.replicas.parallel.replica, 1)
    alone = replace(result, replicas=replace(result.replicas, parallel=parallel))
    _show_plan(read(*TINY_LLAMA, *options, *groups), alone)
    assert "replicas:" not in capsys.readouterr().out
    of_one_stage = (*options, *groups, "mode=pipeline")
    _show_plan(read(*TINY_LLAMA, *of_one_stage), _planned(*of_one_stage))
    message = (
        "pipeline:  none, each replica is one stage; give more devices or a smaller data_parallel"
    )
    assert message in capsys.readouterr().out
    # Each of the two devices of a replica sums the gradients of its own shards.
    graph = result.captured.graph
    gradients = graph.value_bytes[graph.gradient_values].sum()
    assert values["all_reduce_gib"] * GIB == pytest.approx(gradients, rel=0.01)


@pytest.fixture(scope="module")
def plain_step(graph_cache: Path) -> tuple[tuple[str, ...], Result]:
    """Return the overrides of a training step of two replicas, captured once, and its plan."""
    cache = f"capture.cache_dir={graph_cache / 'fxpart'}"
    step = ("phase=training", "mode=single", "model.batch_size=2", "data_parallel=2", cache)
    return step, _planned(*step, "devices=2x16gb")


_BLOCK_BYTES = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 176 + 2 * 64)
_ROOT_BYTES = 2 * (2 * 256 * 64 + 64)


@pytest.mark.parametrize(
    ("stage", "gathered_bytes", "scattered_bytes", "collectives"),
    [
        (1, _ROOT_BYTES + _BLOCK_BYTES, 0, 1),
        (2, _ROOT_BYTES + _BLOCK_BYTES, _ROOT_BYTES + _BLOCK_BYTES, 2 + 2),
        # The block's weights are gathered again for its backward.
        (3, _ROOT_BYTES + 2 * _BLOCK_BYTES, _ROOT_BYTES + _BLOCK_BYTES, 3 + 2),
    ],
)
def test_shards_of_replicas_are_stored_and_waited_for(
    plain_step: tuple[tuple[str, ...], Result],
    stage: int,
    gathered_bytes: int,
    scattered_bytes: int,
    collectives: int,
) -> None:
    step, whole = plain_step
    plain = headline(whole)
    result = _planned(*step, "devices=2x16gb", f"zero={stage}")
    sharded = headline(result)
    assert sharded["collectives"] == collectives
    moved_bytes = gathered_bytes + scattered_bytes
    assert sharded["collective_gib"] * GIB == pytest.approx(moved_bytes)
    assert 0 < sharded["exposed_collective_ms"] <= sharded["collective_ms"]
    copies = 1 if stage == 1 else 2
    assert sharded["weights_gib"] == pytest.approx(plain["weights_gib"] / copies, rel=0.01)
    assert sharded["optimizer_state_gib"] < plain["optimizer_state_gib"]
    assert (sharded["all_reduce_gib"] < plain["all_reduce_gib"]) is (stage > 1)
    assert result.shards is not None
    count = "1 collective of 154.38 KiB takes" if stage == 1 else f"{collectives} collectives of"
    assert zero_line(read(*step, f"zero={stage}"), result.shards).startswith(
        f"stage {stage}: {count}"
    )


def test_updated_parts_are_gathered_at_the_end_of_a_schedule(
    plain_step: tuple[tuple[str, ...], Result],
) -> None:
    step, _ = plain_step
    pipeline = (*step, "devices=2x16gb", "schedule=1f1b", "microbatches=2")
    whole, parts = (_planned(*pipeline, f"zero={stage}") for stage in (0, 1))
    assert whole.schedule is not None
    assert parts.schedule is not None
    assert parts.shards is not None
    (update,) = parts.schedule.updates
    updates_s = parts.problem.costs.op_time_s[parts.problem.graph.is_update, 0].sum()
    assert update.finish_s - update.start_s == pytest.approx(updates_s + parts.shards.collective_s)
    assert parts.schedule.step_s == update.finish_s
    saved_gib = headline(whole)["optimizer_state_gib"] - headline(parts)["optimizer_state_gib"]
    saved_bytes = whole.schedule.peak_bytes[0] - parts.schedule.peak_bytes[0]
    # Updates allocate less, too.
    assert saved_bytes >= saved_gib * GIB > 0


def test_stages_gather_their_weights_once_or_for_each_microbatch(
    plain_step: tuple[tuple[str, ...], Result],
) -> None:
    step, _ = plain_step
    pipeline = (*step, "devices=4x16gb", "mode=pipeline", "schedule=1f1b", "microbatches=2")
    kept, again = (_planned(*pipeline, f"zero={stage}") for stage in (2, 3))
    # The busiest stage gathers its root and its block, and scatters both; if its forwards reshard,
    # the block again for the next forward or for both backwards.
    for result, collectives in ((kept, 4), (again, 6)):
        assert result.shards is not None
        assert result.schedule is not None
        assert result.shards.collectives == collectives
        assert result.schedule.step_s > result.shards.exposed_s > 0
        # Beside the whole weights of a stage lies this replica's half of each.
        graph = result.problem.graph
        shards, _, _, _ = graph.state_tensor_bytes[::-1]
        assert shards.sum() == pytest.approx(graph.weight_bytes.sum() / 2, rel=0.01)
        # Only the loss is summed as a whole.
        assert headline(result)["all_reduce_gib"] * GIB < 16
    assert kept.schedule is not None
    assert again.schedule is not None
    assert kept.schedule.step_s < again.schedule.step_s


def test_microbatches_on_one_device_each_scatter_their_gradients(
    plain_step: tuple[tuple[str, ...], Result],
) -> None:
    step, _ = plain_step
    overrides = (*step, "devices=2x16gb", "zero=3")
    once, more = _planned(*overrides), _planned(*overrides, "schedule=1f1b", "microbatches=3")
    assert once.shards is not None
    assert more.shards is not None
    assert more.schedule is not None
    assert more.shards.collectives == 3 * once.shards.collectives
    updates_s = float(once.problem.costs.op_time_s[once.problem.graph.is_update, 0].sum())
    alone_s = once.shards.latency_s - updates_s
    # The loss is summed once.
    assert more.schedule.step_s == pytest.approx(3 * alone_s + updates_s, rel=0.01)
    # Whole weights and gradients are never more than one microbatch needs.
    shard_bytes = int(once.problem.graph.total_weight_bytes)
    assert more.schedule.peak_bytes[0] <= once.evaluation.peak_bytes + 2 * shard_bytes


def test_a_step_of_megatron_on_every_kind_of_parallelism() -> None:
    layout = ("devices=8x16gb", "tensor_parallel=2", "sequence_parallel=true", "data_parallel=2")
    step = ("phase=training", "model.batch_size=2", "schedule=1f1b", "microbatches=4")
    more = ("model.config.num_hidden_layers=2", "mode=equal_layers", "zero=1", "engine=megatron")
    result = _planned(*layout, *step, *more)
    assert result.schedule is not None
    assert len(result.schedule.peak_bytes) == 2
    assert result.replicas is not None
    assert "engine=megatron" in result.subject_line
    # For bfloat16 weights: float32 gradients, and half of a copy and of two states each.
    graph = result.problem.graph
    state_bytes, weight_bytes = graph.weight_state_bytes.sum(), graph.weight_bytes.sum()
    assert state_bytes == pytest.approx(weight_bytes / 2 * (4 + 12 / 2), rel=0.02)
    kept = [need.parts["kept gradients"].expected for need in result.device_memory]
    # Weights of a block, split over two devices; norms are not split.
    block_bytes = 2 * ((64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 176) // 2 + 2 * 64)
    assert kept == [block_bytes] * 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("phase=inference",), "got phase=inference; use phase=training"),
        (("model.loss=mean",), "got model.loss=mean; use model.loss=own"),
        (("data_parallel=2",), "got data_parallel=2 zero=0; use zero=1"),
        (("optimizer=none",), "got optimizer=none; use optimizer=adamw"),
        (
            ("checkpointing=selective",),
            "got checkpointing=selective; use checkpointing=core_attention",
        ),
        (
            ("backward_order=late_weight_gradients",),
            "got backward_order=late_weight_gradients; use backward_order=autograd",
        ),
    ],
)
def test_megatron_is_planned_as_a_whole_step(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(message)):
        check_training(read(*TINY_LLAMA, "engine=megatron", "phase=training", *overrides))


def test_the_updates_of_megatron_are_fused() -> None:
    config = read(*TINY_LLAMA, "engine=megatron", "phase=training", "optimizer=adamw")
    assert config.optimizer.implementation == "foreach"  # the preset's
    assert optimizer_of(config).implementation == "fused"


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_of_weights_in_replicas_of_several_devices_are_refused_before_a_capture(
    stage: int,
) -> None:
    step = ("phase=training", "data_parallel=2", "model.batch_size=2", f"zero={stage}")
    no_model = "model.config.hidden_size=-1"  # of which no capture could be made
    with pytest.raises(
        NotApplicableError, match=(f"zero={stage} over replicas of 2 devices requires")
    ):
        _planned(*step, "devices=4x16gb", no_model)
    turns = ("mode=single", "schedule=1f1b", "microbatches=4")
    advice = f"zero={stage} with mode=single requires .* use data_parallel=4 .* or mode=pipeline"
    with pytest.raises(NotApplicableError, match=advice):
        _planned(*step, *turns, "devices=4x16gb", no_model)


def test_a_combination_refused_when_typed_is_not_suggested(
    plain_step: tuple[tuple[str, ...], Result],
) -> None:
    step, _ = plain_step
    # Several devices per replica would hold it, but are only planned with a schedule.
    small = ("mode=pipeline", "zero=3", "reserve=none", "devices=2x0.28mb")
    config = read(*TINY_LLAMA, *step, *small)
    with pytest.raises(InfeasibleError, match=r"take larger devices.* not enough: mode=kl_based$"):
        plan(config, model_spec(config), may_capture=False)


_TWO_REPLICAS = ("phase=training", "data_parallel=2", "devices=2x16gb")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("zero=5",), "zero=5 does not exist; there are 0, 1, 2, 3"),
        (("zero=3",), "add phase=training and data_parallel=2 or more"),
        (("zero=3", "phase=training"), "got one replica; add data_parallel=2 or more, or context_"),
        (("zero=3", "data_parallel=2"), "got phase=inference; add phase=training"),
        (
            ("zero=1", "phase=training", "data_parallel=2", "optimizer=none"),
            "zero=1 shards the optimizer's state, got optimizer=none; use optimizer=adamw",
        ),
        (
            ("zero=2", *_TWO_REPLICAS, "schedule=gpipe", "microbatches=2"),
            "got schedule=gpipe on replicas of one device; use schedule=1f1b",
        ),
        (
            (
                "zero=2",
                *_TWO_REPLICAS,
                "schedule=interleaved",
                "+mode.interleave=4",
                "devices=4x16gb",
            ),
            "at most 3 on a device in torch's schedules, got mode.interleave=4; use 2 or 3",
        ),
        (
            ("reduce_dtype=float32",),
            "in which gradients are scattered, got phase=inference; use phase=training",
        ),
        (
            ("reduce_dtype=float32", *_TWO_REPLICAS),
            "got zero=0; use zero=2 or 3, or reduce_dtype=null",
        ),
        (
            ("zero=3", "reduce_dtype=float16", "model.dtype=float32", *_TWO_REPLICAS),
            "got model.dtype=float32; use a dtype of as many bits or more",
        ),
        (
            ("zero=3", "reduce_dtype=fp32", *_TWO_REPLICAS),
            "reduce_dtype=fp32 is not known; nearest: float32",
        ),
    ],
)
def test_impossible_sharding_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        check_zero(read(*TINY_LLAMA, *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("capture.symbolic=batch",), "leave out capture.symbolic=batch"),
        (("latency=profiled",), "leave out latency=profiled"),
        (("execute=local", "devices=2xcpu", "transfer_rate=loopback"), "leave out execute=local"),
    ],
)
def test_combinations_that_exclude_each_other_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(NotApplicableError, match=re.escape(message)):
        check_split(read(*TINY_LLAMA, "tensor_parallel=2", *overrides))


def test_impossible_degrees_are_refused() -> None:
    with pytest.raises(SpecError, match="tensor_parallel=0 must be 1 or more"):
        check_split(read(*TINY_LLAMA, "tensor_parallel=0"))
    for degree, line in (
        (4, "must divide the number of devices, there are 6; use 2"),
        (3, r"must divide model\.config\.num_attention_heads=8; use 2 or 4 on .*, or 2 on 6"),
    ):
        with pytest.raises(NotApplicableError, match=f"{line}$"):
            check(read(*TINY_LLAMA, "devices=6x16gb", f"tensor_parallel={degree}"))
    with pytest.raises(NotApplicableError, match=r"^context_parallel=3 needs .*; make it 2 or 4, "):
        dealt_out(read(*TINY_LLAMA, "devices=4x16gb", "context_parallel=3"))
    uneven = (*TINY_LLAMA, "model.seq_len=18", "devices=4x16gb", "context_parallel=2")
    with pytest.raises(NotApplicableError, match=r"4 chunks, .* use model\.seq_len=16 or 20$"):
        check(read(*uneven))


def test_devices_beyond_the_heads_of_keys_cache_copies_of_them() -> None:
    """There are 8 heads of queries and 4 of keys: from 4 devices on, each caches one head."""
    decode = (*TINY_LLAMA, "phase=decode", "context_len=64", "mode=single")
    config, four = (
        read(*decode, f"devices={count}x16gb", f"tensor_parallel={count}") for count in (8, 4)
    )
    split, whole_heads = (plan(each, model_spec(each)) for each in (config, four))
    assert split.split is not None
    assert whole_heads.split is not None
    graphs = (split.captured.graph, whole_heads.captured.graph)
    cache_bytes = [graph.value_alloc_bytes[graph.value_is_cache].sum() for graph in graphs]
    assert cache_bytes == [2 * 64 * 8 * 2] * 2  # keys and values of 64 tokens, a head of 8 bfloat16
    assert split_line(split.split).startswith(
        "1 group of 8 devices, each head of keys and values on 2;"
    )
    assert "each head" not in split_line(whole_heads.split)
    line = carrier_line(config, split.problem, split.assignment, None)
    assert line.startswith("vLLM (vllm.sh); not llama.cpp: it splits heads of keys"), line
    with pytest.raises(NotApplicableError, match=r"num_key_value_heads=4; use 4$"):
        check(read(*TINY_LLAMA, "devices=8x16gb", "tensor_parallel=8", "phase=training"))


def test_a_degree_that_heads_do_not_allow_names_the_nearest_that_they_do() -> None:
    three = read("model=llama3_1_8b", "devices=3x16gb", "tensor_parallel=3")
    with pytest.raises(
        NotApplicableError,
        match=r"=32; use 2 or 4 on a multiple of that many devices, or 1 on 3$",
    ):
        check_tensor_degree(three, 3, 3)
    with pytest.raises(NotApplicableError, match=r"=32; use 2 or 4$"):
        check_tensor_degree(three, 3, 12)
    with pytest.raises(NotApplicableError, match=r"devices, there are 6; use 2$"):
        check_tensor_degree(three, 4, 6)
