"""Execute a plan on this machine: `local` in this process, `pipeline` in a process per stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.peak_tensors import peaks_in_turn
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables, freed_after_readers
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from fxpart.execution.forward_devices import forward_devices
from fxpart.schedule import (
    ScheduleResult,
    engine_peak_bytes,
    engine_stages,
    stage_costs,
    step_on_cores,
)
from fxpart.schedule.engine_memory import ENGINE_SCHEDULES
from fxpart.support.host import available_cores
from runner.config.schema import Config
from runner.experiment.measurement import Measured
from runner.experiment.operator_times import MOST_MEASURED, is_measured
from runner.experiment.subject import Subject

if TYPE_CHECKING:
    from fxpart.capture.training.joint import JointCapture
    from fxpart.execution.local import LocalRun
    from fxpart.execution.pipeline_run import PipelineRun
    from fxpart.execution.real_model import RealModel
    from fxpart.execution.stages.chain import Chain

__all__ = ["STAGES_FOLDER", "carry_out", "check_execute"]

STAGES_FOLDER = "stages"
_SEEDS = 2**63
"""Torch's seeds are below this."""
_MOST_TIMEOUT_S = 1e6


@dataclass(frozen=True, eq=False, slots=True)
class _Task:
    """A plan to execute."""

    config: Config
    spec: ModelSpec
    real: "RealModel"
    problem: Problem
    planned: Assignment
    """The placement of the operators of `problem`."""
    placed: Assignment
    """The placement of the operators of `real`: only the forward of a training step."""
    step: "JointCapture | None"
    """The training step that `planned` places; None in inference."""
    schedule: ScheduleResult | None
    chain: "Chain | None"
    """The stages, if they are run or saved."""


def check_execute(config: Config) -> None:
    """Raise `SpecError` if ``execute`` is unknown or out of range, or conflicts with `config`."""
    execute = config.execute
    ways = ("none", *WAYS)
    if execute.name not in ways:
        raise SpecError(
            f"execute={execute.name} does not exist; {nearest_names(execute.name, ways)}"
        )
    if execute.name == "none":
        return
    for name, limit in {**MOST_MEASURED, "timeout_s": _MOST_TIMEOUT_S}.items():
        if not 0 < getattr(execute, name) <= limit:
            raise SpecError(
                f"execute.{name}={getattr(execute, name)} must be above 0 and at most {limit}"
            )
    if not 0 <= execute.seed < _SEEDS:
        raise SpecError(f"execute.seed={execute.seed} must be at least 0 and below 2^63")
    if config.capture.level != "operator":
        raise SpecError(
            f"execute={execute.name} runs operators, got capture.level={config.capture.level};"
            " use capture.level=operator"
        )
    if execute.name == "pipeline" and config.schedule.name not in ENGINE_SCHEDULES:
        raise NotApplicableError(
            f"execute=pipeline runs a schedule of torch's engine, got schedule="
            f"{config.schedule.name}; use schedule=gpipe or schedule=1f1b"
        )
    _refuse_other_measurements(config)


def _refuse_other_measurements(config: Config) -> None:
    """Raise `SpecError` if times are measured on another device or thread count than the run's."""
    for name in ("device", "threads") if is_measured(config.latency) else ():
        measured, run = getattr(config.latency, name), getattr(config.execute, name)
        if measured != run:
            raise SpecError(
                f"latency.{name}={measured} differs from execute.{name}={run}, so operators would "
                f"not be measured as they are run; leave out latency.{name}, or make the two equal"
            )


def carry_out(
    config: Config,
    spec: ModelSpec,
    subject: Subject,
    *,
    problem: Problem,
    assignment: Assignment,
    schedule: ScheduleResult | None,
    folder: Path,
) -> Measured:
    """Run the plan and return its measurements with their predictions.

    With ``execute.save_stages`` the stages are saved in ``stages`` below `folder`.

    Raises:
        FxpartError: if it cannot be run, or its results differ from the unsplit model's.

    """
    from fxpart.capture.training.own_checkpoints import calls_checkpoint
    from fxpart.execution.device import torch_threads

    real, execute = subject.real, config.execute
    assert real is not None, "a model to run has been built"
    if config.phase.name == "training" and calls_checkpoint(real.program.graph_module):
        raise NotApplicableError(
            f"execute={execute.name} runs captured operators, which recompute nothing, but the"
            " model calls torch.utils.checkpoint itself; turn that off in the model, or set"
            " execute=none"
        )
    placed = _forward_assignment(subject, real, assignment)
    if schedule is not None and execute.name == "pipeline":
        # Merge the partitions of a device into one stage, as in the schedule.
        placed = _by_device(placed.device_of, schedule.devices)
    with torch_threads(execute.threads):
        in_stages = execute.name == "pipeline" or execute.save_stages
        chain = _chain(real, placed) if in_stages else None
        if chain is not None and execute.save_stages:
            _save(real, chain, folder / STAGES_FOLDER)
        task = _Task(config, spec, real, problem, assignment, placed, subject.step, schedule, chain)
        return WAYS[execute.name](task)


def _forward_assignment(subject: Subject, real: "RealModel", planned: Assignment) -> Assignment:
    """Return the placement of the program to run: only the forward of a training step."""
    if not subject.exported_names:
        return planned
    device_of = forward_devices(planned.device_of, subject.exported_names, real.graph)
    return partition_by_device(real.graph, device_of)


def _by_device(device_of: IntArray, devices: Sequence[int]) -> Assignment:
    """Return one partition for each of `devices` with operators, in the order of `devices`."""
    used = [device for device in devices if bool(np.any(device_of == device))]
    number = {device: stage for stage, device in enumerate(used)}
    stage_of = np.array([number[device] for device in device_of.tolist()], dtype=np.int64)
    return Assignment(stage_of, tuple((device,) for device in used))


def _local(task: _Task) -> Measured:
    """Measure a run in this process, backward included."""
    problem, home = task.problem, task.planned.device_of
    devices = problem.topology.n_devices
    run = _run_here(task, devices)
    times = problem.costs.op_time_s[np.arange(len(home)), home]
    return Measured(
        way="local",
        time_s=run.latency_s,
        runs_s=run.runs_s,
        predicted_s=float(times.sum()),
        throughput_per_s=run.throughput_per_s,
        unsplit_s=run.unsplit_latency_s,
        peak_bytes=run.peak_bytes,
        predicted_peak_bytes=peaks_in_turn(
            problem.graph, _memory_as_split(task), task.planned, devices
        ),
        allocator_peak_bytes=run.allocator_peak_bytes,
        max_difference=run.max_difference,
        gradient_difference=run.gradient_difference,
        tied_gradient_difference=None,
        nan_elements=run.nan_elements,
        device_name=run.device_name,
        threads=run.threads,
    )


def _memory_as_split(task: _Task) -> MemoryTables:
    """Return the tables of the split graph, where no variables of the model keep values alive.

    A user's Function, which runs as it is under autograd, does.
    """
    memory = task.problem.memory
    freed = freed_after_readers(memory)
    if task.step is None or task.config.backward_order != "autograd":
        return freed
    graph, kept = task.problem.graph, task.step.kept_by_functions()
    is_kept = [op >= 0 and graph.names[op] in kept for op in graph.value_producer.tolist()]
    return freed._replace(held=np.where(is_kept, memory.held, freed.held))


def _run_here(task: _Task, devices: int) -> "LocalRun":
    repeats = task.config.execute.repeats
    if task.step is not None and task.config.backward_order != "autograd":
        from fxpart.execution.step_run import run_step

        return run_step(task.real, task.step, task.planned, devices, repeats=repeats)
    from fxpart.execution.local import run_local

    training = task.config.phase.name == "training"
    return run_local(task.real, task.placed, devices, repeats=repeats, training=training)


def _step_s(
    config: Config, problem: Problem, assignment: Assignment, schedule: ScheduleResult
) -> float:
    """Return the predicted step time on this machine, where stages may share cores."""
    if config.execute.device != "cpu":
        return schedule.step_s
    cores = max(1, available_cores() // config.execute.threads)
    costs = stage_costs(problem, assignment)
    return step_on_cores(schedule.name, costs, schedule.microbatches, cores)


def _engine_peaks(
    real: "RealModel", problem: Problem, assignment: Assignment, schedule: ScheduleResult
) -> dict[int, int]:
    """Return the predicted peak bytes of each device's stage in its process."""
    graph, training = real.graph, schedule.training
    peaks = engine_peak_bytes(
        schedule.name,
        engine_stages(problem, assignment),
        schedule.microbatches,
        training=training,
        # A training step returns the loss; its forward returns the results that the engine keeps.
        result_bytes=int(graph.value_bytes[graph.value_is_output].sum()) if training else 0,
    )
    return dict(zip(schedule.devices, peaks, strict=True))


def _run_stages(task: _Task, chain: "Chain") -> "PipelineRun":
    """Run a step in one process per stage."""
    from fxpart.execution.pipeline_run import run_pipeline
    from fxpart.execution.real_model import drawn_microbatches
    from fxpart.execution.unsplit_reference import refuse_another_model

    config, execute = task.config, task.config.execute
    training = config.phase.name == "training"
    refuse_another_model(chain, task.real, training=training, threads=execute.threads)
    return run_pipeline(
        chain,
        drawn_microbatches(task.spec, task.real, chain, config.microbatches, execute.seed),
        training=training,
        schedule=config.schedule.name,
        steps=execute.repeats,
        timeout_s=execute.timeout_s,
        threads=execute.threads,
    )


def _gradients_apart(run: "PipelineRun") -> float | None:
    """Return the largest gradient difference, of tied or other weights; None without gradients."""
    shares = (run.gradient_difference, run.tied_gradient_difference)
    return max((share for share in shares if share is not None), default=None)


def _pipeline(task: _Task) -> Measured:
    """Measure a step in one process per stage."""
    chain, schedule = task.chain, task.schedule
    assert chain is not None, "a pipeline has stages"
    assert schedule is not None, "a pipeline has a schedule"
    run = _run_stages(task, chain)
    peaks = _engine_peaks(task.real, task.problem, task.planned, schedule)
    homes = [devices[0] for devices in task.placed.devices_of_partition]
    return Measured(
        way="pipeline",
        time_s=run.step_s,
        runs_s=run.runs_s,
        predicted_s=_step_s(task.config, task.problem, task.planned, schedule),
        throughput_per_s=run.throughput_per_s,
        unsplit_s=None,
        peak_bytes=run.stage_peak_bytes,
        predicted_peak_bytes=tuple(peaks[home] for home in homes),
        allocator_peak_bytes=(),
        max_difference=run.max_difference,
        gradient_difference=_gradients_apart(run),
        tied_gradient_difference=run.tied_gradient_difference,
        nan_elements=run.nan_elements,
        device_name=run.device_name,
        threads=run.threads,
    )


def _chain(real: "RealModel", placed: Assignment) -> "Chain":
    from fxpart.execution.split.placement import split_by_assignment
    from fxpart.execution.stages.chain import chain_stages

    return chain_stages(split_by_assignment(real.program.module(), real.graph, placed))


def _save(real: "RealModel", chain: "Chain", folder: Path) -> None:
    from fxpart.execution.stages.stage_files import save_stages

    save_stages(chain, folder, chain.flat_inputs(real.args, real.kwargs))


WAYS: Mapping[str, Callable[[_Task], Measured]] = {"local": _local, "pipeline": _pipeline}
"""The values of ``execute`` besides ``none``."""
