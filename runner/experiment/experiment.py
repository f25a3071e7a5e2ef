"""One experiment: a typed `Config` in, a placement and its cost out.

`carried_out` adds what was measured where the plan is also run. No file is written but stages, if
`config` asks for them.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from fxpart.capture.captured import CapturedGraph
from fxpart.capture.models.misspelt import refuse_misspelt
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.granularity import check_level, depth_of
from fxpart.core.phases import check_phase
from fxpart.cost.collective_times import TimesWithCollectives
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.kernels import schedule as schedule_loop
from fxpart.cost.peak_tensors import DevicePeak, device_peaks
from fxpart.cost.prefetch import ShardedStep
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.symbolic.sweep import Sums
from fxpart.cost.tables import LatencySource
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import Place
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.optimal.mode import Progress
from fxpart.placement.saturate import saturate
from fxpart.schedule import ScheduleResult
from fxpart.support.compiled import is_kept
from runner.config.sections import RECOMMEND, Config
from runner.experiment.batch_report import BatchReport, batch_report
from runner.experiment.carry_out import carry_out, check_execute
from runner.experiment.compiled_whole import compiled_whole
from runner.experiment.device_memory import (
    device_memory,
    does_not_fit,
    partners,
    with_less_memory,
)
from runner.experiment.generation import Generation, GenerationPlan, generation
from runner.experiment.measured import Measured
from runner.experiment.mesh import check_mesh
from runner.experiment.objective import check_objective, watched, with_proven_bound
from runner.experiment.offload import check_offload, placed
from runner.experiment.operator_times import (
    check_latency,
    operator_times,
    roofline_note,
    source_note,
)
from runner.experiment.pipeline_schedule import check_schedule, scheduled
from runner.experiment.rates import check_prices, price_per_hour
from runner.experiment.remedy import with_remedy
from runner.experiment.replicas import Replicas, check_replicas, with_sums
from runner.experiment.runtime import as_kernels, check_runtime
from runner.experiment.serving import check_serving
from runner.experiment.serving_table import ServingRow, check_table, serving_table
from runner.experiment.subject import (
    Subject,
    graph_to_place,
    model_spec,
    shared_subject,
    symbols_of,
)
from runner.experiment.subject_line import subject_line
from runner.experiment.tensor_split import Dealt, TensorSplit, check_split, dealt_out, split_cost
from runner.experiment.topology import build_topology, rounding_bytes
from runner.experiment.training import check_training
from runner.experiment.user_mode import chosen_mode
from runner.experiment.whole_modules import WholeModules, whole_modules
from runner.experiment.zero import (
    Gather,
    check_shard_devices,
    check_zero,
    weight_gathers,
    with_shards,
)
from runner.output.figures import check_figures
from runner.output.terminal import counted, progress, quiet

__all__ = ["Result", "carried_out", "check", "check_all", "model_spec", "plan", "problem_of"]

_MOST_BATCHES = 2**14
"""Of a sweep over batch sizes: each is a row of its table."""
_MOST_PLANS = 4
"""Tries to find one that fits with what it needs beside tensors."""
LARGEST = 100
"""Tensors of each device that are listed at its peak."""


# Without slots, for the cached property.
@dataclass(frozen=True, eq=False)
class Result:
    """What an experiment found."""

    subject: Subject
    problem: Problem
    assignment: Assignment
    evaluation: Evaluation
    partition_s: float
    """Time that the mode took."""
    batch_size: int = 1
    """Examples in one input, of all replicas together."""
    tokens: int | None = None
    """In an example of a model of texts."""
    price_per_hour: float | None = None
    """Of all devices, in USD, where it is known."""
    step: str | None = None
    """Which step of serving, one of `fxpart.core.phases.CACHED_STEPS`."""
    measured_on: str | None = None
    """The device whose operators were measured, where times come from measurements."""
    schedule: ScheduleResult | None = None
    """The pipeline that was asked for."""
    replicas: Replicas | None = None
    """What data parallelism costs; `evaluation` is of one replica, sums included."""
    device_memory: tuple[DeviceMemory, ...] = ()
    """What each device needs, beside tensors too."""
    batches: BatchReport | None = None
    """The plan at other sizes."""
    measured: Measured | None = None
    """What was measured when the plan was carried out."""
    whole: WholeModules | None = None
    """Beside a search: the best plan that keeps modules whole."""
    subject_line: str = ""
    """What was planned, as `runner.experiment.subject_line` has it."""
    shards: ShardedStep | None = None
    """What ZeRO costs; its collectives are in the times of `evaluation`."""
    split: TensorSplit | None = None
    """What tensor parallelism costs; every device of `evaluation` then stands for a group."""
    curve: tuple[Progress, ...] = ()
    """How `mode=optimal` went on."""
    offloaded: Offloaded | None = None
    """Which weights lie in tiers beside the devices, where the devices do not hold all."""
    generation: Generation | None = None
    """Of ``phase=generate``: what prompts and decode take; `evaluation` is of the last decode."""
    other_sizes: tuple[ServingRow, ...] = ()
    """The same of each pair in ``serving_sweep``."""
    times_note: str = ""
    """Where the times come from, if a plan that is carried out here has them from elsewhere."""

    @cached_property
    def peaks(self) -> tuple[DevicePeak, ...]:
        """Where each device's memory is fullest, with the `LARGEST` tensors there."""
        return device_peaks(self.problem, self.assignment, LARGEST)

    @property
    def has_gap(self) -> bool:
        """Whether the latency is what was asked for, so that its distance from a bound says much.

        A schedule gives up the latency of one microbatch for that of a step, and copies for what a
        stream of inputs takes; sums over replicas are in the latency, and in no bound.
        """
        return self.schedule is None and self.replicas is None and self.evaluation.rounds == 1

    @property
    def trains(self) -> bool:
        """Whether a training step is planned."""
        return bool(self.problem.graph.is_backward.any())

    @property
    def captured(self) -> CapturedGraph:
        """The graph that is placed, before operators are grouped."""
        return self.subject.captured


def plan(
    config: Config, spec: ModelSpec, *, may_capture: bool = True, advises: bool = True
) -> Result:
    """Return the placement that `config` asks for and what it costs; `spec` is its `model_spec`.

    Where the model does not fit, `advises` says whether it is looked for what would make it fit,
    and `may_capture` whether graphs are captured for that.

    Raises:
        FxpartError: for anything that the user can mend, such as a model that does not fit.

    """
    try:
        return _planned(config, spec)
    except InfeasibleError as error:
        if not advises:
            raise
        raise with_remedy(config, error, _fitted, may_capture=may_capture) from error


def _fitted(config: Config) -> ScheduleResult | None:
    """Place the model, and simulate its schedule if it has one, as `_planned` does.

    Raises:
        FxpartError: where it does not fit, or `config` makes no sense.

    """
    check(config)
    spec = model_spec(config)
    subject = shared_subject(config, spec)
    problem, _, _ = problem_of(config, subject, spec)
    place = chosen_mode(config)
    return scheduled(config, problem, place(problem))


def problem_of(
    config: Config, subject: Subject, spec: ModelSpec
) -> tuple[Problem, LatencySource, Dealt]:
    """Return what is placed, where its times come from, and how devices are dealt out."""
    dealt = dealt_out(config)
    parallel = dealt.parallel
    graph = as_kernels(config, graph_to_place(config, subject), parallel.replica.n_devices)
    times = operator_times(config, subject, spec.key())
    if dealt.exchanges:
        times = TimesWithCollectives(times, dealt.exchanges)
    problem = make_problem(graph, parallel.replica, times, config.objective)
    return problem, times, dealt


def _planned(config: Config, spec: ModelSpec) -> Result:
    # Cheap checks come before the capture.
    check(config)
    place = chosen_mode(config)
    check_shard_devices(config, dealt_out(config).parallel)
    with progress(f"capturing {spec.name}"):
        subject = shared_subject(config, spec)
        if subject.steps is not None:
            check_table(config, subject.steps)
    problem, times, dealt = problem_of(config, subject, spec)
    compiles = "" if is_kept(schedule_loop) else ", its loops compiled for once"
    count = counted(problem.graph.n_ops, "operator")
    with progress(f"placing {count} with {config.mode.name}{compiles}"):
        found = _fitting_plan(config, subject, problem, dealt, place=place, times=times)
        problem, assignment, replicas = found.problem, found.made.assignment, found.replicas
        whole = None if found.made.offloaded else whole_modules(config, problem, assignment, place)
    return Result(
        subject,
        problem,
        assignment,
        found.evaluation,
        found.made.partition_s,
        batch_size=config.model.batch_size,
        tokens=config.model.seq_len,
        price_per_hour=price_per_hour(config),
        step=spec.step,
        measured_on=getattr(times, "device_name", None),
        schedule=found.schedule,
        replicas=replicas,
        device_memory=found.device_memory,
        batches=_batches(config, subject, problem, assignment, times=times, replicas=replicas),
        whole=whole,
        subject_line=subject_line(config, subject.unconverted or subject.captured.graph),
        times_note=source_note(config, times, problem.graph) or roofline_note(config),
        shards=found.shards,
        split=split_cost(problem, assignment, dealt.groups, dealt.exchanges)
        if dealt.exchanges
        else None,
        curve=found.made.curve,
        offloaded=found.made.offloaded,
        generation=generation(found.both_steps) if found.both_steps else None,
        other_sizes=serving_table(found.both_steps) if found.both_steps else (),
    )


class _Made(NamedTuple):
    """A placement, the time that the mode took for it, and how its search came there."""

    assignment: Assignment
    partition_s: float
    curve: tuple[Progress, ...]
    offloaded: Offloaded | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """A placement with what it costs."""

    made: _Made
    problem: Problem
    """What is costed: of streamed weights, or of the whole model compiled, not what was placed."""
    evaluation: Evaluation
    replicas: Replicas | None
    schedule: ScheduleResult | None
    device_memory: tuple[DeviceMemory, ...]
    shards: ShardedStep | None
    both_steps: GenerationPlan | None
    """Of ``phase=generate``."""


def _fitting_plan(
    config: Config,
    subject: Subject,
    problem: Problem,
    dealt: Dealt,
    *,
    place: Place,
    times: LatencySource,
) -> _Plan:
    """Return a plan whose devices hold what it needs beside tensors, too.

    A mode knows what is reserved of each device whatever lies there. What the allocator and kernels
    take depends on the plan: where that does not fit, the mode is asked again with that much less.

    Raises:
        InfeasibleError: when no plan is found that fits.

    """
    searched, failed = problem, None
    with_copies = partial(_placed, config, place)
    searched_s, curves = 0.0, tuple[Progress, ...]()
    for _ in range(_MOST_PLANS):
        begin = time.perf_counter()
        try:
            with watched(shown=not quiet()) as curve:
                assignment, in_tiers = placed(config, searched, problem, times, with_copies)
        except InfeasibleError as error:
            if failed is None:
                raise
            raise does_not_fit(failed.device_memory) from error
        # Of all tries together: the first plan's search is part of how the last was found.
        curves += tuple(replace(p, seconds=searched_s + p.seconds) for p in curve)
        searched_s += time.perf_counter() - begin
        costed = in_tiers.problem if in_tiers else problem
        if not in_tiers:
            costed, assignment = compiled_whole(
                config, subject, problem, assignment, times=times, searched=searched
            )
        made = _Made(assignment, searched_s, curves, in_tiers)
        found = _costed(config, subject, costed, dealt, times=times, made=made)
        if all(need.verdict != "does not fit" for need in found.device_memory):
            return found
        failed = found
        searched = with_less_memory(searched, found.evaluation, found.device_memory)
    assert failed is not None
    raise does_not_fit(failed.device_memory)


def _costed(
    config: Config,
    subject: Subject,
    problem: Problem,
    dealt: Dealt,
    *,
    times: LatencySource,
    made: _Made,
) -> _Plan:
    """Return what a placement costs."""
    assignment, replicas = made.assignment, None
    evaluation = made.offloaded.evaluation if made.offloaded else evaluate(problem, assignment)
    if problem.workload is not None:
        evaluation = with_proven_bound(evaluation, problem.objective, made.curve)
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
    shards: ShardedStep | None = None
    gathers: list[Gather] = []
    if config.zero:
        if config.zero == 1:
            gathers = weight_gathers(
                config,
                problem,
                assignment,
                evaluation,
                parallel=dealt.parallel,
                curves=dealt.curves,
            )
        evaluation, shards = with_shards(
            config,
            problem,
            evaluation,
            parallel=dealt.parallel,
            curves=dealt.curves,
            gathers=gathers,
        )
    sums = replicas.cost if replicas else None
    schedule = scheduled(config, problem, assignment, sums, [g.seconds for g in gathers])
    # A published problem has sizes of its own, and devices that are no real ones.
    needs = (
        device_memory(config, problem, assignment, evaluation, schedule)
        if subject.workload is None
        else ()
    )
    both_steps = None
    if subject.steps is not None:
        peers = partners(config, evaluation)
        both_steps = GenerationPlan(config, subject.steps, problem, assignment, times, peers)
        needs = both_steps.needs()
    return _Plan(made, problem, evaluation, replicas, schedule, needs, shards, both_steps)


def _batches(
    config: Config,
    subject: Subject,
    problem: Problem,
    assignment: Assignment,
    *,
    times: LatencySource,
    replicas: Replicas | None,
) -> BatchReport | None:
    """Return what the plan costs at other sizes, where `config` asks for that."""
    if subject.symbolic is None or config.capture.symbolic == "none":
        return None
    sums = None
    if replicas and subject.partial is not None:
        sums = Sums(subject.partial, replicas.parallel, config.all_reduce.bucket_bytes)
    with progress(f"costing batch sizes 1 to {config.batch_sweep}"):
        return batch_report(
            subject.symbolic,
            problem,
            assignment,
            latency=times,
            sizes=subject.sizes,
            rounding_bytes=rounding_bytes(config.devices, config.reserve),
            most=config.batch_sweep,
            sums=sums,
        )


def carried_out(config: Config, spec: ModelSpec, result: Result, folder: Path) -> Result:
    """Return the `result` of `plan` with what was measured, if `config` asks for a run.

    Stages that are to be saved are written below `folder`.

    Raises:
        FxpartError: when the plan cannot be carried out, or its results differ.

    """
    if config.execute.name == "none":
        return result
    with progress(f"running {spec.name}"):
        measured = carry_out(
            config,
            spec,
            result.subject,
            problem=result.problem,
            assignment=result.assignment,
            schedule=result.schedule,
            folder=folder,
        )
    return replace(result, measured=measured)


def check(config: Config) -> None:
    """Check all that can be checked without a model.

    Raises:
        SpecError: for what does not exist or does not go together, with what to write instead.

    """
    if config.model.library == "transformers" and config.model.architecture is not None:
        refuse_misspelt(config.model.architecture, config.model.config)
    depth_of(config.granularity)
    check_level(config.capture.level)
    check_phase(config.phase.name, config.capture.level)
    check_runtime(config)
    check_schedule(config)
    check_figures(config.figures)
    check_objective(config)
    check_training(config)
    check_serving(config)
    check_offload(config)
    check_replicas(config)
    check_split(config)
    check_mesh(config)
    check_zero(config)
    check_prices(config)
    symbols_of(config)
    if not 1 <= config.batch_sweep <= _MOST_BATCHES:
        raise SpecError(f"batch_sweep={config.batch_sweep} must be from 1 to {_MOST_BATCHES}")
    # Before the latency, whose device and threads are by default those of the run.
    check_execute(config)
    check_latency(config)


def check_all(config: Config) -> None:
    """Check what `plan` checks before it looks at a model: choices, mode, devices and their sizes.

    Raises:
        FxpartError: for what does not exist or does not go together.

    """
    model_spec(config)
    check(config)
    if config.mode.name != RECOMMEND:  # whose options are checked where it chooses
        chosen_mode(config)
    build_topology(config.devices, config.transfer_rate, config.reserve)


def _placed(config: Config, place: Place, problem: Problem) -> Assignment:
    assignment = place(problem)
    return saturate(problem, assignment) if config.devices.saturate_host else assignment
