"""What no placement beats: times and memory that leave a plan out before it is placed."""

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
    """Of one input, or microbatch, on the devices of a replica; of the step without additions.

    ZeRO, recomputation, and replicas only add operators: what holds without them holds with them,
    but for updates of weights, which ZeRO shards.
    """

    problem: Problem
    load_s: float
    """Some device, or group, computes so long for it."""
    repeated_s: float
    """The same without updates of weights, which a step has once."""
    alone_s: float
    """All operators but updates take so long one after the other, each where it is fastest."""
    checkpointing: str
    """That of the step."""
    holds_bytes: int
    """All of it on one device, at its peak: devices together need no less."""

    @cached_property
    def latency_s(self) -> float:
        """It takes so long from its begin to its end."""
        return lower_bound_s(self.problem)


def bounds_of(config: Config, subject: Subject, *, checkpointing: str) -> Bounds:
    """Return the bounds of all plans on the devices of a replica of `config`.

    They hold for whole operators. `subject` is captured for the examples that a replica takes.
    """
    problem, _, _ = problem_of(config, subject, model_spec(config))
    costs, updates = problem.costs, problem.graph.is_update
    repeated = np.where(updates[:, None], 0.0, costs.op_time_s)
    without = replace(problem, costs=costs._replace(op_time_s=repeated))
    return Bounds(
        problem,
        load_bound_s(problem),
        load_bound_s(without),
        float(repeated.min(axis=1).sum()),
        checkpointing,
        whole_model_bytes(problem),
    )


def least_time_s(plan: Plan, bounds: Bounds, *, streams: bool) -> float:
    """Return the time that no step of `plan` beats, or with `streams` no input of a stream."""
    if plan.schedule == "none":
        if streams:
            return bounds.load_s
        return bounds.repeated_s if plan.zero else bounds.latency_s
    busy_s = plan.microbatches * bounds.repeated_s
    if plan.interleave > 1:  # the first stage on each device may be short
        return max(busy_s, bounds.alone_s)
    return max(busy_s, least_step_s(bounds.alone_s, plan.groups, plan.microbatches))


def refuse_too_large(plan: Plan, bounds: Bounds) -> None:
    """Raise `InfeasibleError` where the devices of a replica together hold less than is needed."""
    graph, devices = bounds.problem.graph, bounds.problem.topology.devices
    weights = graph.total_weight_bytes
    state = int(graph.weight_state_bytes.sum())
    shards = plan.replicas if plan.zero else 1
    needed = weights // (shards if plan.zero > 1 else 1) + state // shards
    # ZeRO shards the temporaries of the updates, too, where the peak often is.
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
