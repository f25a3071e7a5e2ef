"""Times that no placement beats: what leaves a plan out before it is placed."""

from dataclasses import dataclass, replace

import numpy as np

from fxpart.cost.bounds import load_bound_s, lower_bound_s
from runner.config.sections import Config
from runner.experiment.experiment import model_spec, problem_of
from runner.experiment.subject import shared_subject
from runner.recommend.space import Plan

__all__ = ["Bounds", "bounds_of", "least_step_s"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one input, or microbatch, on the devices of a replica; seconds."""

    load_s: float
    """Some device, or group, computes so long for it."""
    repeated_s: float
    """The same without updates of weights, which a step has once."""
    latency_s: float
    """It takes so long from its begin to its end."""


def bounds_of(config: Config) -> Bounds:
    """Return the bounds of all placements and schedules that `config` may have.

    They hold for whole operators on these devices. Collectives of replicas only add to them.

    Raises:
        FxpartError: for a model that cannot be captured or split so.

    """
    spec = model_spec(config)
    problem, _, _ = problem_of(config, shared_subject(config, spec), spec)
    costs, updates = problem.costs, problem.graph.is_update
    repeated = np.where(updates[:, None], 0.0, costs.op_time_s)
    without = replace(problem, costs=costs._replace(op_time_s=repeated))
    return Bounds(load_bound_s(problem), load_bound_s(without), lower_bound_s(problem))


def least_step_s(plan: Plan, bounds: Bounds, *, streams: bool) -> float:
    """Return the time that no step of `plan` beats, or with `streams` no input of a stream."""
    if plan.schedule != "none":
        return plan.microbatches * bounds.repeated_s
    return bounds.load_s if streams else bounds.latency_s
