"""One experiment: a typed `Config` in, a placement and its cost out.

`carried_out` adds measurements if the plan is also run. No files are written except stages, if
`config` asks for them.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import MOST_KEPT_GRAPHS, OpGraph
from fxpart.cost.async_tensor import AsyncTensorTimes
from fxpart.cost.collective_times import TimesWithCollectives
from fxpart.cost.kernels import schedule as schedule_loop
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.symbolic.sweep import Sums
from fxpart.cost.tables import LatencySource
from fxpart.errors import InfeasibleError
from fxpart.placement import Place
from fxpart.placement.compile_ahead import compiled_ahead, missing_parts
from fxpart.schedule import ScheduleResult
from fxpart.support.compiled import is_kept
from fxpart.support.host import available_cores
from runner.config.schema import Config, ModeConfig, ScheduleConfig
from runner.experiment.batch_report import BatchReport, batch_report
from runner.experiment.carry_out import carry_out
from runner.experiment.check import check
from runner.experiment.degrees import devices_of_a_head
from runner.experiment.fitting_plan import CostedPlan, bounded, fitting_plan
from runner.experiment.float8 import with_float8
from runner.experiment.generation import generation
from runner.experiment.model_spec import model_spec
from runner.experiment.operator_times import innermost, is_measured, operator_times, source_note
from runner.experiment.rates import price_per_hour
from runner.experiment.remedy import with_remedy
from runner.experiment.replicas import Replicas
from runner.experiment.result import Result
from runner.experiment.runtime import as_kernels
from runner.experiment.serving import with_dequantization
from runner.experiment.serving_table import check_table, serving_table
from runner.experiment.subject import Subject, graph_to_place, shared_subject
from runner.experiment.subject_line import subject_line
from runner.experiment.tensor_split import Dealt, dealt_out, split_cost
from runner.experiment.topology import build_topology, rounding_bytes
from runner.experiment.training import check_decided
from runner.experiment.user_mode import chosen_mode
from runner.experiment.weight_format import check_kept
from runner.experiment.whole_modules import WholeModules, whole_modules
from runner.experiment.zero import check_shard_devices
from runner.output.terminal import counted, progress


def plan(
    config: Config,
    spec: ModelSpec,
    *,
    may_capture: bool = True,
    advises: bool = True,
    compiles_ahead: bool = False,
) -> Result:
    """Return the placement requested by `config` and its cost; `spec` is its `model_spec`.

    If the model does not fit and `advises`, changes that would make it fit are tried for the error
    message; `may_capture` allows capturing graphs for that. With `compiles_ahead`, other processes
    compile loops during the capture.

    Raises:
        InfeasibleError: if the model does not fit.
        FxpartError: for any other user error.

    """
    # A device smaller than its reserve holds nothing, so that no advice would help.
    build_topology(config.devices, config.transfer_rate, config.reserve)
    try:
        return _planned(config, spec, compiles_ahead=compiles_ahead)
    except InfeasibleError as error:
        if not advises:
            raise
        raise with_remedy(config, error, _fitted, may_capture=may_capture) from error


def _fitted(config: Config) -> ScheduleResult | None:
    """Place the model like `_planned`, and return its schedule, if any.

    Raises:
        FxpartError: if it does not fit, or `config` is invalid.

    """
    check(config)
    check_shard_devices(config, dealt_out(config).parallel)
    spec = model_spec(config)
    subject = shared_subject(config, spec)
    problem, times, dealt = problem_of(config, subject, spec)
    place = chosen_mode(config)
    return fitting_plan(config, subject, problem, dealt, place=place, times=times).schedule


def problem_of(
    config: Config, subject: Subject, spec: ModelSpec
) -> tuple[Problem, LatencySource, Dealt]:
    """Return the placement problem, its source of operator times, and the groups of devices.

    Plans of one graph that differ only in mode, schedule and microbatches share them.
    """
    latency, graph = config.latency, subject.captured.graph
    shared = replace(config, mode=ModeConfig("", {}), schedule=ScheduleConfig(), microbatches=1)
    for known in tuple(_known_problems):
        if known.graph is graph and known.config == shared:
            return known.problem_times_groups
    found = _problem_of(config, subject, spec)
    # Other sources of times read files, which may change.
    if latency.is_computed and not latency.tables and not subject.workload:
        _known_problems.append(_KnownProblem(graph, shared, found))
    return found


class _KnownProblem(NamedTuple):
    """A `problem_of`, with what determines it."""

    graph: OpGraph
    config: Config
    problem_times_groups: tuple[Problem, LatencySource, Dealt]


_known_problems = deque[_KnownProblem](maxlen=MOST_KEPT_GRAPHS)


def _problem_of(
    config: Config, subject: Subject, spec: ModelSpec
) -> tuple[Problem, LatencySource, Dealt]:
    dealt = dealt_out(config)
    parallel = dealt.parallel
    graph = as_kernels(config, graph_to_place(config, subject), parallel.replica.n_devices)
    times = with_dequantization(config, operator_times(config, subject, spec.key()))
    times = with_float8(config, times)
    if dealt.exchanges:
        times = TimesWithCollectives(times, dealt.exchanges)
    if config.async_tensor_parallel:
        times = AsyncTensorTimes(times)
    problem = make_problem(graph, parallel.replica, times, config.objective)
    return problem, times, dealt


def _has_idle_core(config: Config) -> bool:
    """Return whether other processes may compile during the capture.

    Measurements need the machine to themselves, and published problems have loops of their own.
    """
    return available_cores() > 1 and not is_measured(config.latency) and not config.model.path


def _captured(config: Config, spec: ModelSpec) -> Subject:
    with progress(f"capturing {spec.name}"):
        subject = shared_subject(config, spec)
        check_kept(config, spec, subject.captured.graph)
        if subject.steps is not None:
            check_table(config, subject.steps)
    return subject


class _Placed(NamedTuple):
    """A captured model with its plan."""

    subject: Subject
    times: LatencySource
    dealt: Dealt
    plan: CostedPlan
    whole: WholeModules | None


def _placed(config: Config, spec: ModelSpec, place: Place, *, compiles_ahead: bool) -> _Placed:
    is_beside = compiles_ahead and _has_idle_core(config)
    parts = missing_parts(config.mode.name) if is_beside else []
    # Looked up now, since another process may have compiled it by the end of the capture.
    compiles = ", its loops compiled for once" if parts or not is_kept(schedule_loop) else ""
    with compiled_ahead(parts, config.mode.name, config.objective) as wait_for_loops:
        subject = _captured(config, spec)
        problem, times, dealt = problem_of(config, subject, spec)
        count = counted(problem.graph.n_ops, "operator")
        with progress(f"placing {count} with {config.mode.name}{compiles}"):
            wait_for_loops()
            costed = bounded(
                fitting_plan(config, subject, problem, dealt, place=place, times=times)
            )
            whole = None
            if not costed.placement.offloaded:
                whole = whole_modules(config, costed.problem, costed.placement.assignment, place)
    return _Placed(subject, times, dealt, costed, whole)


def _planned(config: Config, spec: ModelSpec, *, compiles_ahead: bool) -> Result:
    # Cheap checks come before the capture.
    check(config)
    check_decided(config)
    place = chosen_mode(config)
    check_shard_devices(config, dealt_out(config).parallel)
    subject, times, dealt, costed, whole = _placed(
        config, spec, place, compiles_ahead=compiles_ahead
    )
    problem, assignment = costed.problem, costed.placement.assignment
    source = innermost(times)
    return Result(
        subject,
        problem,
        assignment,
        costed.evaluation,
        costed.placement.partition_s,
        batch_size=config.model.batch_size,
        tokens=config.model.seq_len,
        price_per_hour=price_per_hour(config),
        step=spec.step,
        measured_on=getattr(source, "device_name", None),
        schedule=costed.schedule,
        replicas=costed.replicas,
        device_memory=costed.device_memory,
        batches=_batches(
            config, subject, problem, assignment, times=times, replicas=costed.replicas
        ),
        whole=whole,
        subject_line=subject_line(
            config,
            subject.unconverted or subject.captured.graph,
            reads_text=subject.steps is None or subject.steps.reads_text,
        ),
        times_note=source_note(config, source, problem.graph),
        shards=costed.shards,
        split=split_cost(
            problem,
            assignment,
            dealt.groups,
            dealt.exchanges,
            costed.schedule.microbatches if costed.schedule else 1,
            head_devices=devices_of_a_head(config),
        )
        if dealt.exchanges
        else None,
        curve=costed.placement.curve,
        offloaded=costed.placement.offloaded,
        generation=generation(costed.both_steps) if costed.both_steps else None,
        other_sizes=serving_table(costed.both_steps) if costed.both_steps else (),
    )


def _batches(
    config: Config,
    subject: Subject,
    problem: Problem,
    assignment: Assignment,
    *,
    times: LatencySource,
    replicas: Replicas | None,
) -> BatchReport | None:
    """Return the cost of the plan at other sizes, if `config` asks for it."""
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
            max_batch=config.batch_sweep,
            sums=sums,
        )


def carried_out(config: Config, spec: ModelSpec, result: Result, folder: Path) -> Result:
    """Return the `result` of `plan` with measurements, if `config` asks for a run.

    Saved stages are written below `folder`.

    Raises:
        FxpartError: if the plan cannot be executed, or its results differ.

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
