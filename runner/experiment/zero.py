"""ZeRO: the parts of a training step sharded over replicas, and the cost of their collectives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.blocks import GATHER
from fxpart.core.data_parallel import DataParallel
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.optimizer import ITEMSIZE, STATE_DTYPES
from fxpart.core.weight_state import with_state
from fxpart.cost.all_reduce import with_buckets
from fxpart.cost.collectives import CollectiveCurves, collective_time_s
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.prefetch import ShardedStep, sharded_step
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError, nearest_names, refuse_unfitting
from fxpart.schedule.stage_shards import WeightShards
from fxpart.sharding.main_gradients import with_main_gradients
from fxpart.sharding.zero import SCATTER, STAGES, WAIT, with_zero
from runner.config.schema import Config
from runner.experiment.degrees import device_count
from runner.experiment.mesh import GATHERING, replica_count, weight_replicas
from runner.experiment.training import finetunes, is_megatron, is_training
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = [
    "check_reduce_dtype",
    "check_shard_devices",
    "check_zero",
    "in_stages",
    "sharded_graph",
    "weight_gathers",
    "weight_shards",
    "with_shards",
    "with_weight_shards",
    "zero_line",
    "zero_metrics",
]


_MOST_GATHERED = 3
"""Number of stages per device whose weights ``_PipelineScheduleRuntime`` of torch 2.13 keeps
gathered at once."""


class Gather(NamedTuple):
    """The weights that a device gathers after its updates."""

    size_bytes: int
    seconds: float


def check_zero(config: Config) -> None:
    """Raise `SpecError` if the ZeRO stage is unknown or conflicts with the rest of `config`."""
    stage = config.zero
    if stage not in STAGES:
        raise SpecError(f"zero={stage} does not exist; there are {', '.join(map(str, STAGES))}")
    if config.reduce_dtype is not None:
        check_reduce_dtype(config)
    if stage == 0:
        return
    missing = {}
    if config.phase.name != "training":
        missing[f"phase={config.phase.name}"] = "phase=training"
    if replica_count(config) == 1:
        missing["one replica"] = "data_parallel=2 or more, or context_parallel"
    if missing:
        raise NotApplicableError(
            f"zero={stage} shards a training step over replicas, got {' and '.join(missing)}; add"
            f" {' and '.join(missing.values())}"
        )
    if stage < GATHERING and config.optimizer.name == "none":
        raise NotApplicableError(
            f"zero={stage} shards the optimizer's state, got optimizer=none; use optimizer=adamw or"
            f" another, or zero={GATHERING}"
        )
    if config.capture.symbolic != "none":
        raise NotApplicableError(
            f"zero={stage} is supported for one size, got "
            f"capture.symbolic={config.capture.symbolic}; leave out one of the two"
        )
    if stage >= GATHERING:
        _check_schedule(config)


def check_reduce_dtype(config: Config) -> None:
    """Refuse a dtype that gradients are not scattered in.

    Raises:
        SpecError: if it is unknown.
        NotApplicableError: if it has fewer bits than the weights, or nothing is scattered.

    """
    setting = f"reduce_dtype={config.reduce_dtype}"
    if config.reduce_dtype not in STATE_DTYPES:
        raise SpecError(
            f"{setting} is not known; {nearest_names(config.reduce_dtype or '', STATE_DTYPES)}"
        )
    dtype = config.model.dtype
    has_bits = ITEMSIZE[config.reduce_dtype] >= ITEMSIZE.get(dtype, 0)
    fitting = {
        f"phase={config.phase.name}": ("phase=training", is_training(config)),
        f"zero={config.zero}": ("zero=2 or 3", config.zero >= GATHERING),
        f"engine={config.engine}": ("engine=torch", not is_megatron(config)),
        f"model.dtype={dtype}": ("a dtype of as many bits or more", has_bits),
    }
    needing = f"{setting} is the dtype in which gradients are scattered"
    refuse_unfitting(needing, fitting, "reduce_dtype=null")


def _check_schedule(config: Config) -> None:
    """Raise `NotApplicableError` for schedules whose weight gathers we do not model as in torch."""
    zero, schedule = f"zero={config.zero}", f"schedule={config.schedule.name}"
    if schedule == "schedule=none":
        return
    if not in_stages(config) and config.schedule.name != "1f1b":
        raise NotApplicableError(
            f"{zero} accumulates the gradients of one microbatch after the other, got {schedule} "
            "on replicas of one device; use schedule=1f1b"
        )
    chunks = config.mode.options.get("interleave", 1)
    if isinstance(chunks, int) and chunks > _MOST_GATHERED:
        raise NotApplicableError(
            f"{zero} requires stages whose weights stay gathered, at most {_MOST_GATHERED} on a "
            f"device in torch's schedules, got mode.interleave={chunks}; use 2 or 3"
        )


def in_stages(config: Config) -> bool:
    """Return whether a replica has several devices, or several tensor-parallel groups."""
    return device_count(config) > config.tensor_parallel * replica_count(config)


def check_shard_devices(config: Config, parallel: DataParallel) -> None:
    """Raise `NotApplicableError` for replicas of several devices that are not a pipeline."""
    n = parallel.replica.n_devices
    if config.zero < GATHERING or n == 1:
        return
    if finetunes(config):
        raise NotApplicableError(
            f"zero={config.zero} over replicas of {n} devices shards trained weights only, and"
            f" finetune={config.finetune.name} freezes most; use replicas of one device, or zero=1"
        )
    if config.schedule.name == "none":
        raise NotApplicableError(
            f"zero={config.zero} over replicas of {n} devices requires a pipeline over "
            "microbatches; add mode=pipeline schedule=1f1b microbatches=8, raise data_parallel, or "
            "use zero=1"
        )
    if config.mode.name == "single":
        raise NotApplicableError(
            f"zero={config.zero} with mode=single requires replicas of one device, got {n} in "
            f"each, of which only one computes; use data_parallel={n * config.data_parallel} with "
            "a model.batch_size that it divides, fewer devices, or mode=pipeline"
        )


def with_weight_shards(config: Config, graph: OpGraph) -> OpGraph:
    """Return the step with weight shards as extra state, if stages gather their weights."""
    if config.zero < GATHERING or not in_stages(config):
        return graph
    sharded = graph.gradient_weights[_sharded_gradients(config, graph)]
    shards = -(-graph.weight_bytes[sharded] // replica_count(config))
    return with_state(graph, sharded, [shards])


def weight_shards(
    config: Config, problem: Problem, parallel: DataParallel, curves: CollectiveCurves | None
) -> WeightShards | None:
    """Return the weight shards of a pipeline's stages; None if weights are not sharded."""
    if config.zero < GATHERING or not in_stages(config):
        return None
    gradients = tuple(_sharded_gradients(config, problem.graph).tolist())
    reshards = config.zero > GATHERING
    return WeightShards(
        parallel.n_replicas, gradients, reshards, parallel.links, curves, config.reduce_dtype
    )


def _sharded_gradients(config: Config, graph: OpGraph) -> IntArray:
    """Return the indices of gradients whose weights are the same on all replicas."""
    replicas = weight_replicas(config, graph)[graph.gradient_weights]
    return np.flatnonzero(replicas == replica_count(config))


def sharded_graph(config: Config, graph: OpGraph, partial: IntArray) -> tuple[OpGraph, IntArray]:
    """Return the sharded step, without updates, and the values that are still all-reduced."""
    if is_megatron(config):
        graph, value_of = with_main_gradients(graph)
        partial = value_of[partial]
    elif config.zero < GATHERING and not config.all_reduce.gradient_as_bucket_view:
        graph = with_buckets(graph, partial)
    # The pipeline stage that gathers a weight is known only after placement.
    stage = min(config.zero, 1) if in_stages(config) else config.zero
    replicas, of_weights = replica_count(config), weight_replicas(config, graph)
    sharded = with_zero(graph, stage, replicas, of_weights, reduce_dtype=config.reduce_dtype)
    remaining = partial
    if config.zero >= GATHERING:
        remaining = partial[~np.isin(partial, graph.gradient_values)]
    return sharded.graph, sharded.value_of[remaining]


def with_shards(
    config: Config,
    problem: Problem,
    evaluation: Evaluation,
    *,
    parallel: DataParallel,
    curves: CollectiveCurves | None = None,
    gathers: Sequence[Gather] = (),
) -> tuple[Evaluation, ShardedStep]:
    """Return the `evaluation` of a replica with the collectives of ZeRO in its times, and these.

    `curves` are of the links between replicas; `gathers` are the `weight_gathers` of stage 1.
    """
    graph, n = problem.graph, parallel.n_replicas
    if config.zero >= GATHERING:
        op_s = problem.costs.op_time_s[:, 0]
        step = sharded_step(
            graph,
            op_s,
            problem.costs.issue_s,
            replicas=n,
            link=parallel.links[0],
            targets=(GATHER, SCATTER, WAIT),
            curves=curves,
        )
    else:
        sizes = [gather.size_bytes for gather in gathers]
        more_s = max(gather.seconds for gather in gathers)
        latency_s = evaluation.latency_s + more_s
        step = ShardedStep(latency_s, 1, max(sizes), more_s, more_s)
    throughput_per_s = 1.0 / step.latency_s
    return replace(evaluation, latency_s=step.latency_s, throughput_per_s=throughput_per_s), step


def weight_gathers(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    *,
    parallel: DataParallel,
    curves: CollectiveCurves | None,
) -> list[Gather]:
    """Return the all-gather of each device's weights at the end, after replicas update shards."""
    graph, count = problem.graph, parallel.n_replicas
    replicas = weight_replicas(config, graph)
    gathers = []
    for device, link in enumerate(parallel.links):
        ops = np.flatnonzero(assignment.device_of == device).tolist()
        used = np.unique([w for op in ops for w in graph.uses_of(op).tolist()]).astype(np.int64)
        trained = np.intersect1d(used, graph.gradient_weights)
        expert_weights = trained[replicas[trained] < count]
        expert_bytes = int(graph.weight_bytes[expert_weights].sum())
        sizes = {count: int(graph.weight_bytes[trained].sum()) - expert_bytes}
        if expert_bytes:  # experts, held by fewer replicas
            sizes[int(replicas[expert_weights[0]])] = expert_bytes
        seconds = sum(
            collective_time_s("all_gather", size, n, link, curves) for n, size in sizes.items()
        )
        gathers.append(Gather(sum(size for n, size in sizes.items() if n > 1), seconds))
    return gathers


def zero_line(config: Config, step: ShardedStep) -> str:
    """Return a line on the cost of sharding."""
    verb = "takes" if step.collectives == 1 else "take"
    # Beside it stands the latency of one microbatch.
    within = "" if config.schedule.name == "none" else " in a step"
    costs = (
        f"stage {config.zero}: {counted(step.collectives, 'collective')} of"
        f" {format_size(step.collective_bytes)}{within} {verb} {format_s(step.collective_s)}"
    )
    if config.zero >= GATHERING and in_stages(config):
        # Exposed time is known only for all stages together: their waits may overlap.
        return (
            f"{costs} on the busiest device; collectives of all devices make the step "
            f"{format_s(step.exposed_s)} longer"
        )
    return f"{costs}, of which {format_s(step.exposed_s)} are waited for"


def zero_metrics(step: ShardedStep) -> dict[str, float]:
    """Return the metrics of sharding by name, without tensor parallelism's part."""
    return {
        "collectives": float(step.collectives),
        "collective_gib": step.collective_bytes / GIB,
        "collective_ms": step.collective_s * 1e3,
        "exposed_collective_ms": step.exposed_s * 1e3,
    }
