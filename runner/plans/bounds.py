"""Lower bounds on time and memory over all placements, used to prune plans before placement."""

from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.bounds import critical_path_s, load_bound_s, lower_bound_s
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.infeasible import describe_devices, whole_model_bytes
from fxpart.schedule import least_interleaved_share, least_step_s
from runner.config.schema import Config
from runner.experiment.experiment import problem_of
from runner.experiment.mesh import GATHERING, weight_replicas
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject
from runner.experiment.training import is_megatron
from runner.plans.space import Plan

__all__ = ["Bounds", "bounds_of", "least_time_s", "needs_latency", "refuse_too_large"]


@dataclass(frozen=True, eq=False, slots=True)
class Bounds:
    """Bounds of one input, or microbatch, on the devices of a replica.

    They are of the bare step. ZeRO, recomputation and replicas only add operators, so the bounds
    hold with them too, except for weight updates, which ZeRO shards.
    """

    memory_bytes: tuple[int, ...]
    """Memory of each device of a replica."""
    load_s: float
    """Lower bound on the time of the busiest device, or group."""
    repeated_s: float
    """`load_s` without weight updates, which a step runs once."""
    path_s: float
    """Longest path of operators on their fastest devices, without transfers and updates."""
    alone_s: float
    """Sum of all operators' times on their fastest devices, without updates."""
    checkpointing: str
    """The checkpointing of the step."""
    holds_bytes: int
    """Peak bytes of the whole model on one device, which all devices together must have."""
    weight_bytes: IntArray
    """Bytes of each weight. Shape (W,)."""
    weight_state_bytes: IntArray
    """Bytes of the optimizer states of each weight. Shape (W,)."""
    trained_weights: IntArray
    """The weights with a gradient, ascending."""
    gradient_bytes: int
    """Bytes of the gradients of all weights, which are live together before the updates."""
    bucket_bytes: int
    """Bytes of DistributedDataParallel's copies of gradients, without ZeRO or with its first
    stage."""
    weight_replicas: IntArray
    """Number of replicas that hold the same copy of each weight. Shape (W,)."""
    latency_s: float | None = None
    """Lower bound on the latency, which takes long to compute; None if it was not needed."""


def bounds_of(
    config: Config, subject: Subject, *, checkpointing: str, with_latency: bool = False
) -> Bounds:
    """Return the bounds of all plans on the devices of one replica of `config`.

    `subject` is captured at the batch size of a replica.
    """
    problem, _, _ = problem_of(config, subject, model_spec(config))
    graph, costs = problem.graph, problem.costs
    updates = graph.is_update
    repeated = np.where(updates[:, None], 0.0, costs.op_time_s)
    repeated_problem = replace(problem, costs=costs._replace(op_time_s=repeated))
    return Bounds(
        tuple(device.memory_bytes for device in problem.topology.devices),
        load_bound_s(problem),
        load_bound_s(repeated_problem),
        _path_s(repeated_problem),
        float(repeated.min(axis=1).sum()),
        checkpointing,
        whole_model_bytes(problem),
        graph.weight_bytes,
        graph.weight_state_bytes,
        np.unique(graph.gradient_weights),
        _gradient_bytes(graph),
        _bucket_bytes(config, graph),
        weight_replicas(config, graph),
        lower_bound_s(problem) if with_latency else None,
    )


def _path_s(problem: Problem) -> float:
    """Return the longest path of all operators but updates, on their fastest devices."""
    costs = problem.costs
    fastest = np.ascontiguousarray(costs.op_time_s.min(axis=1, keepdims=True))
    # ZeRO may launch fewer updates.
    issue_s = np.where(problem.graph.is_update, 0.0, costs.issue_s)
    anywhere = np.zeros(problem.graph.n_ops, dtype=np.int64)
    return float(critical_path_s(costs._replace(op_time_s=fastest, issue_s=issue_s), anywhere))


def _bucket_bytes(config: Config, graph: OpGraph) -> int:
    """Return the bytes of copies of the gradients that replicas sum."""
    if config.all_reduce.gradient_as_bucket_view or is_megatron(config):
        return 0
    is_summed = weight_replicas(config, graph)[graph.gradient_weights] > 1
    return int(graph.value_bytes[graph.gradient_values[is_summed]].sum())


def _gradient_bytes(graph: OpGraph) -> int:
    """Return the bytes of all gradients; views of a storage need no more than the storage."""
    values = np.unique(graph.gradient_values)
    owners = values.copy()
    while (is_view := graph.value_base[owners] >= 0).any():
        owners = np.where(is_view, graph.value_base[owners], owners)
    viewed_bytes = np.zeros(graph.n_values, dtype=np.int64)
    np.add.at(viewed_bytes, owners, graph.value_bytes[values])
    return int(np.minimum(viewed_bytes, graph.value_alloc_bytes)[np.unique(owners)].sum())


def needs_latency(plan: Plan, *, streams: bool) -> bool:
    """Return whether a sharp `least_time_s` of `plan` needs the bound on the latency."""
    return plan.schedule == "none" and not streams and not plan.zero


def least_time_s(plan: Plan, bounds: Bounds, *, streams: bool) -> float:
    """Return a lower bound on the step time of `plan`; with `streams`, on its time per input."""
    if plan.schedule == "none":
        if streams:
            return bounds.load_s
        if plan.zero:
            return max(bounds.repeated_s, bounds.path_s)
        known = bounds.latency_s
        return max(bounds.load_s, bounds.path_s) if known is None else known
    busy_s = plan.microbatches * bounds.repeated_s
    if plan.interleave > 1:
        share = least_interleaved_share(plan.groups, plan.interleave, plan.microbatches)
        return max(busy_s, bounds.alone_s * share)
    return max(busy_s, least_step_s(bounds.alone_s, plan.groups, plan.microbatches))


def refuse_too_large(plan: Plan, bounds: Bounds) -> None:
    """Raise `InfeasibleError` if no placement on the devices of a replica can fit."""
    needed = _least_bytes(plan, bounds)
    # The peak is often in the updates, whose temporaries ZeRO shards too.
    if not plan.zero and plan.checkpointing == bounds.checkpointing:
        needed = max(needed, bounds.holds_bytes)
    sizes = bounds.memory_bytes
    available = max(sizes) if plan.mode == "single" else sum(sizes)
    if needed <= available:
        return
    have = f"its devices have {describe_devices(list(sizes))}"
    if plan.mode == "single" and len(sizes) > 1:
        have = f"mode=single takes one device, of {show_bytes(available)} at most"
    raise InfeasibleError(
        f"a replica holds {show_bytes(needed)} ({needed} bytes) at least, {have}",
        needed_bytes=needed,
        available_bytes=available,
    )


def _least_bytes(plan: Plan, bounds: Bounds) -> int:
    """Return a lower bound on the bytes that a replica holds at one time, as modes count them.

    Stages hold gathered weights beside their shards of them, and whole gradients until the last
    microbatch. On one device, all weights are gathered at the end of the forward of ZeRO-2, where
    there are no gradients yet; of ZeRO-3, only shards and optimizer states are certain.
    """
    replicas, trained = bounds.weight_replicas, bounds.trained_weights
    weights, gradient_bytes = bounds.weight_bytes, bounds.gradient_bytes
    states = bounds.weight_state_bytes // (replicas if plan.zero else 1)
    sharded = trained[replicas[trained] == plan.replicas]
    shard_bytes = int((weights[sharded] // plan.replicas).sum())
    if plan.zero < GATHERING:
        gradient_bytes += bounds.bucket_bytes
        shard_bytes = 0
    elif plan.groups == 1:
        gradient_bytes = 0
        if plan.zero > GATHERING:
            weights, shard_bytes = weights // replicas, 0
    return int(weights.sum()) + int(states.sum()) + gradient_bytes + shard_bytes
