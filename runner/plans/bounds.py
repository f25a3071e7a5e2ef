"""Lower bounds on time and memory over all placements, used to prune plans before placement."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.infeasible import describe_devices, whole_model_bytes
from fxpart.schedule import least_step_s
from runner.config.sections import Config
from runner.experiment.experiment import problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject
from runner.plans.space import Plan

__all__ = ["Bounds", "bounds_of", "least_time_s", "refuse_too_large"]


# Without slots, for the cached property.
@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of one input, or microbatch, on the devices of a replica.

    They are of the bare step. ZeRO, recomputation and replicas only add operators, so the bounds
    hold with them too, except for weight updates, which ZeRO shards.
    """

    problem: Problem
    load_s: float
    """Lower bound on the time of the busiest device, or group."""
    repeated_s: float
    """`load_s` without weight updates, which a step runs once."""
    alone_s: float
    """Sum of all operators' times on their fastest devices, without updates."""
    checkpointing: str
    """The checkpointing of the step."""
    holds_bytes: int
    """Peak bytes of the whole model on one device, which all devices together must have."""

    @cached_property
    def latency_s(self) -> float:
        """Lower bound on the latency."""
        return lower_bound_s(self.problem)


def bounds_of(config: Config, subject: Subject, *, checkpointing: str) -> Bounds:
    """Return the bounds of all plans on the devices of one replica of `config`.

    `subject` is captured at the batch size of a replica.
    """
    problem, _, _ = problem_of(config, subject, model_spec(config))
    costs, updates = problem.costs, problem.graph.is_update
    repeated = np.where(updates[:, None], 0.0, costs.op_time_s)
    repeated_problem = replace(problem, costs=costs._replace(op_time_s=repeated))
    return Bounds(
        problem,
        load_bound_s(problem),
        load_bound_s(repeated_problem),
        float(repeated.min(axis=1).sum()),
        checkpointing,
        whole_model_bytes(problem),
    )


def least_time_s(plan: Plan, bounds: Bounds, *, streams: bool) -> float:
    """Return a lower bound on the step time of `plan`; with `streams`, on its time per input."""
    if plan.schedule == "none":
        if streams:
            return bounds.load_s
        return bounds.repeated_s if plan.zero else bounds.latency_s
    busy_s = plan.microbatches * bounds.repeated_s
    if plan.interleave > 1:  # the first stage on each device may be short
        return max(busy_s, bounds.alone_s)
    return max(busy_s, least_step_s(bounds.alone_s, plan.groups, plan.microbatches))


def refuse_too_large(plan: Plan, bounds: Bounds) -> None:
    """Raise `InfeasibleError` if the devices of a replica together have too little memory."""
    graph, devices = bounds.problem.graph, bounds.problem.topology.devices
    weights = graph.total_weight_bytes
    state = int(graph.weight_state_bytes.sum())
    shards = plan.replicas if plan.zero else 1
    needed = weights // (shards if plan.zero > 1 else 1) + state // shards
    # The peak is often in the updates, whose temporaries ZeRO shards too.
    if not plan.zero and plan.checkpointing == bounds.checkpointing:
        needed = max(needed, bounds.holds_bytes)
    sizes = [device.memory_bytes for device in devices]
    if needed <= sum(sizes):
        return
    raise InfeasibleError(
        f"a replica holds {show_bytes(needed)} ({needed} bytes) at least, its devices have"
        f" {describe_devices(sizes)}",
        needed_bytes=needed,
        available_bytes=sum(sizes),
    )
