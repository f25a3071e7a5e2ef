"""Find a placement that fits together with the memory devices need besides tensors."""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from fxpart.core.assignment import Assignment
from fxpart.cost.all_reduce import AllReduce
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluate import evaluate_unbounded, with_bounds
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.prefetch import ShardedStep
from fxpart.cost.problem import Problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import InfeasibleError
from fxpart.placement import Place
from fxpart.placement.offload.other_sizes import TieredPlan
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.optimal.mode import Progress
from fxpart.placement.saturate import saturate
from fxpart.schedule import ScheduleResult
from runner.config.schema import Config
from runner.experiment.compiled_whole import compiled_whole
from runner.experiment.device_memory import device_memory, does_not_fit, partners, with_less_memory
from runner.experiment.generation import GenerationPlan
from runner.experiment.objective import watched, with_proven_bound
from runner.experiment.offload import machine_of, placed
from runner.experiment.pipeline_schedule import scheduled
from runner.experiment.replicas import Replicas, with_sums
from runner.experiment.subject import Subject
from runner.experiment.tensor_split import Dealt
from runner.experiment.user_mode import chosen_mode
from runner.experiment.zero import Gather, weight_gathers, weight_shards, with_shards
from runner.output.terminal import quiet

_MOST_PLANS = 4
"""Most attempts to find a plan that fits, before everything is moved to tiers."""
_SHARES_OF_MISSING = (1.0, 0.5, 0.25)
"""Shares of the missing bytes by which the memory of a generation's search is lowered each time."""
_MOST_PLANS_BY_SHARE = 6
"""Most plans of a generation for each of `_SHARES_OF_MISSING`, the first included."""
_ONE_PLAN = ("single", "equal_layers", "aot_based")
"""Modes with a single plan for a model and its devices, whatever their memory."""
_LATER_SHARE = 0.25
"""Share of a mode's time limit that each attempt after the first gets."""


class Placed(NamedTuple):
    """A placement, the time its mode took, and the progress of the search."""

    assignment: Assignment
    partition_s: float
    curve: tuple[Progress, ...]
    offloaded: Offloaded | None = None


@dataclass(frozen=True, eq=False, slots=True)
class CostedPlan:
    """A placement with its cost."""

    placement: Placed
    problem: Problem
    """The costed problem, which may differ from the placed one: with streamed weights, or with the
    whole model compiled at once."""
    evaluation: Evaluation
    replicas: Replicas | None
    schedule: ScheduleResult | None
    device_memory: tuple[DeviceMemory, ...]
    shards: ShardedStep | None
    both_steps: GenerationPlan | None
    """Prefill and decode of ``phase=generate``."""

    @property
    def fits(self) -> bool:
        """Whether every device has the memory needed, including that besides tensors."""
        return all(need.verdict != "does not fit" for need in self.device_memory)


def fitting_plan(
    config: Config,
    subject: Subject,
    problem: Problem,
    dealt: Dealt,
    *,
    place: Place,
    times: LatencySource,
) -> CostedPlan:
    """Return a plan that fits with all memory that it needs besides tensors, without lower bounds.

    Modes know the fixed reserve of each device, but the memory of the allocator and of kernels
    depends on the plan. If that does not fit, the mode runs again with that much less memory, in a
    generation with shares of that, and finally with everything possible in tiers, if there are any.

    Raises:
        InfeasibleError: if no plan is found that fits.

    """
    attempt = partial(_attempt, config, subject, problem, dealt, place=place, times=times)
    first = candidate = attempt(problem)
    if first.fits:
        return first
    attempt = partial(attempt, place=_with_shorter_limit(config, place))
    # A mode plans for a generation's decode: the missing bytes of its prefill may be far more than
    # what a plan of the decode has to move.
    is_generation = subject.steps is not None and first.placement.offloaded is None
    most_plans = _MOST_PLANS_BY_SHARE if is_generation else _MOST_PLANS
    for share in _SHARES_OF_MISSING if is_generation else (1.0,):
        searched, planned = problem, first
        with suppress(InfeasibleError):
            for _ in range(most_plans - 1):
                searched = with_less_memory(
                    searched,
                    planned.evaluation,
                    planned.device_memory,
                    share,
                    in_proportion=is_generation or planned.schedule is not None,
                    keeps_fitting=is_generation,
                )
                planned = candidate = attempt(searched, before=candidate)
                if candidate.fits:
                    return candidate
    with suppress(InfeasibleError):
        if not candidate.fits and candidate.placement.offloaded:
            candidate = attempt(problem, before=candidate, everything=True)
    if not candidate.fits:
        is_only = config.mode.name in _ONE_PLAN and candidate.placement.offloaded is None
        raise does_not_fit(candidate.device_memory, is_only=is_only)
    return candidate


def bounded(plan: CostedPlan) -> CostedPlan:
    """Return the plan with its lower bounds, which take long; one with tiers has them already."""
    if plan.placement.offloaded:
        return plan
    evaluation = with_bounds(plan.evaluation, plan.problem)
    if plan.problem.workload is not None:
        curve = plan.placement.curve
        evaluation = with_proven_bound(evaluation, plan.problem.objective, curve)
    return replace(plan, evaluation=evaluation)


def _with_shorter_limit(config: Config, place: Place) -> Place:
    """Return the mode with `_LATER_SHARE` of its time limit, if it has one."""
    options = config.mode.options
    limit_s = options.get("time_limit_s")
    if not isinstance(limit_s, int | float) or options.get("steps") is not None:
        return place
    shorter = replace(config.mode, options={**options, "time_limit_s": limit_s * _LATER_SHARE})
    return chosen_mode(replace(config, mode=shorter))


def _attempt(
    config: Config,
    subject: Subject,
    problem: Problem,
    dealt: Dealt,
    searched: Problem,
    *,
    place: Place,
    times: LatencySource,
    before: CostedPlan | None = None,
    everything: bool = False,
) -> CostedPlan:
    """Place for the devices of `searched`, and return the cost on those of `problem`.

    The search time includes that of the attempt `before`.
    """
    begin = time.perf_counter()
    with watched(shown=not quiet()) as curve:
        machine = machine_of(config, searched, problem, times)
        assignment, in_tiers = placed(
            config, searched, machine, partial(_placed, config, place), everything=everything
        )
    earlier_s, curves = (
        (before.placement.partition_s, before.placement.curve) if before else (0.0, ())
    )
    curves += tuple(replace(p, seconds=earlier_s + p.seconds) for p in curve)
    placement = Placed(assignment, earlier_s + time.perf_counter() - begin, curves, in_tiers)
    costed_problem = in_tiers.problem if in_tiers else problem
    if not in_tiers:
        costed_problem, assignment = compiled_whole(
            config, subject, problem, assignment, times=times, searched=searched
        )
        placement = placement._replace(assignment=assignment)
    return _costed(
        config, subject, costed_problem, dealt, times=times, placement=placement, whole=problem
    )


def _costed(
    config: Config,
    subject: Subject,
    problem: Problem,
    dealt: Dealt,
    *,
    times: LatencySource,
    placement: Placed,
    whole: Problem,
) -> CostedPlan:
    """Return the cost of a placement; `whole` is the problem before anything moved to tiers."""
    assignment, replicas = placement.assignment, None
    evaluation = (
        placement.offloaded.evaluation
        if placement.offloaded
        else evaluate_unbounded(problem, assignment)
    )
    if subject.partial is not None:
        evaluation, replicas = with_sums(
            config,
            problem,
            assignment,
            evaluation=evaluation,
            parallel=dealt.parallel,
            partial=subject.partial,
            ranks=subject.partial_ranks,
            curves=dealt.curves,
        )
    sums = replicas.cost if replicas else None
    evaluation, schedule, shards = _timed(
        config, problem, assignment, evaluation, dealt=dealt, sums=sums
    )
    # A published problem defines its own sizes, and its devices are not real ones.
    needs = (
        device_memory(config, problem, assignment, evaluation, schedule)
        if subject.workload is None
        else ()
    )
    both_steps = None
    if subject.steps is not None:
        peers = partners(config, evaluation)
        # Other sizes are tried with the full memory of the devices, not with a mode's limits.
        machine = machine_of(config, whole, whole, times)
        tiers = TieredPlan.of(placement.offloaded) if placement.offloaded else None
        both_steps = GenerationPlan(
            config, subject.steps, problem, assignment, times, peers, machine, tiers
        )
        needs = both_steps.needs()
    return CostedPlan(placement, problem, evaluation, replicas, schedule, needs, shards, both_steps)


def _timed(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    evaluation: Evaluation,
    *,
    dealt: Dealt,
    sums: AllReduce | None,
) -> tuple[Evaluation, ScheduleResult | None, ShardedStep | None]:
    """Return the times of a placement with its schedule and the collectives of ZeRO.

    `evaluation` is of one input through a replica, and `sums` are the all-reduces over replicas.
    All-gathers of weights by pipeline stages appear only in the times of the schedule.
    """
    parallel, curves = dealt.parallel, dealt.curves
    weights = weight_shards(config, problem, parallel, curves)
    if weights is not None:
        schedule = scheduled(config, problem, assignment, sums, shards=weights)
        return evaluation, schedule, schedule.shards if schedule else None
    if not config.zero:
        return evaluation, scheduled(config, problem, assignment, sums), None
    gathers: list[Gather] = []
    if config.zero == 1:
        gathers = weight_gathers(config, problem, assignment, parallel=parallel, curves=curves)
    evaluation, shards = with_shards(
        config, problem, evaluation, parallel=parallel, curves=curves, gathers=gathers
    )
    schedule = scheduled(
        config,
        problem,
        assignment,
        sums,
        gathers_s=[gather.seconds for gather in gathers],
        waits_s=0.0 if gathers else shards.exposed_s,
    )
    if schedule and not gathers:
        shards = shards.times(schedule.microbatches, schedule.step_s)
    return evaluation, schedule, shards


def _placed(config: Config, place: Place, problem: Problem) -> Assignment:
    assignment = place(problem)
    return saturate(problem, assignment) if config.devices.saturate_host else assignment
