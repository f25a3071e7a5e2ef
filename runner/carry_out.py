"""Carrying a plan out on this machine: `local` in this process, `pipeline` in one a stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.machine import available_cores
from fxpart.errors import SpecError, nearest_names
from fxpart.forward_devices import forward_devices
from fxpart.graph import IntArray
from fxpart.models.spec import ModelSpec
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem
from fxpart.schedule import (
    ScheduleResult,
    engine_peak_bytes,
    engine_stages,
    stage_costs,
    step_on_cores,
)
from runner.config import Config
from runner.measured import Measured
from runner.subject import Subject

if TYPE_CHECKING:
    from fxpart.execution.real_model import RealModel
    from fxpart.pipeline import Chain

__all__ = ["STAGES_FOLDER", "carry_out", "check_execute"]

WAYS = ("none", "local", "pipeline")
ENGINE_SCHEDULES = ("gpipe", "1f1b")
STAGES_FOLDER = "stages"


def check_execute(config: Config) -> None:
    """Raise `SpecError` for a way of running that does not exist, or lacks what it needs."""
    execute = config.execute
    if execute.name not in WAYS:
        raise SpecError(
            f"execute={execute.name} does not exist; {nearest_names(execute.name, WAYS)}"
        )
    if execute.name == "none":
        return
    for name in ("repeats", "threads", "timeout_s"):
        if getattr(execute, name) <= 0:
            raise SpecError(f"execute.{name}={getattr(execute, name)} must be above 0")
    if config.capture.level != "operator":
        raise SpecError(
            f"execute={execute.name} runs operators, got capture.level={config.capture.level};"
            " use capture.level=operator"
        )
    if execute.name == "pipeline" and config.schedule.name not in ENGINE_SCHEDULES:
        raise SpecError(
            f"execute=pipeline runs a schedule of torch's engine, got schedule="
            f"{config.schedule.name}; use schedule=gpipe or schedule=1f1b"
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
    """Run the plan and return what was measured beside what was predicted.

    With ``execute.save_stages``, the stages are kept in ``stages`` below `folder`.

    Raises:
        FxpartError: when it cannot be run, or computes something else than the unsplit model.

    """
    from fxpart.execution.threads import torch_threads

    real = subject.real
    assert real is not None, "what is carried out has been built"
    placed = _forward_assignment(subject, real, assignment)
    if schedule is not None and config.execute.name == "pipeline":
        # Partitions that follow each other on a device are one stage, there as in the schedule.
        placed = _by_device(placed.device_of, schedule.devices)
    with torch_threads(config.execute.threads):
        if config.execute.save_stages:
            _save(real, _chain(real, placed), folder / STAGES_FOLDER)
        if config.execute.name == "local":
            return _local(config, real, problem, planned=assignment, placed=placed)
        assert schedule is not None, "a pipeline has a schedule"
        return _pipeline(
            config,
            spec,
            real,
            placed,
            _engine_peaks(real, problem, assignment, schedule),
            _step_s(config, problem, assignment, schedule),
        )


def _forward_assignment(subject: Subject, real: "RealModel", planned: Assignment) -> Assignment:
    """Return the plan for what is run: of a training step its forward, where it was placed."""
    if not subject.exported_names:
        return planned
    device_of = forward_devices(planned.device_of, subject.exported_names, real.graph)
    return partition_by_device(real.graph, device_of)


def _by_device(device_of: IntArray, devices: Sequence[int]) -> Assignment:
    """Return a partition for each of `devices` that has an operator, in their order."""
    used = [device for device in devices if bool(np.any(device_of == device))]
    number = {device: stage for stage, device in enumerate(used)}
    stage_of = np.array([number[device] for device in device_of.tolist()], dtype=np.int64)
    return Assignment(stage_of, tuple((device,) for device in used))


def _local(
    config: Config,
    real: "RealModel",
    problem: Problem,
    *,
    planned: Assignment,
    placed: Assignment,
) -> Measured:
    """Return what a run here shows beside what was predicted of `planned`, backward included."""
    from fxpart.execution.local import run_local

    devices, training = problem.topology.n_devices, config.phase.name == "training"
    run = run_local(real, placed, devices, repeats=config.execute.repeats, training=training)
    home = planned.device_of
    times = problem.costs.op_time_s[np.arange(len(home)), home]
    return Measured(
        way="local",
        time_s=run.latency_s,
        runs_s=run.runs_s,
        predicted_s=float(times.sum()),
        throughput_per_s=run.throughput_per_s,
        unsplit_s=run.unsplit_latency_s,
        peak_bytes=run.peak_bytes,
        predicted_peak_bytes=tuple(int(peak) for peak in peak_bytes(problem.memory, home, devices)),
        max_difference=run.max_difference,
        gradient_difference=run.gradient_difference,
        device_name=run.device_name,
        threads=run.threads,
    )


def _step_s(
    config: Config, problem: Problem, assignment: Assignment, schedule: ScheduleResult
) -> float:
    """Return the predicted step on this machine, where stages may have to share cores."""
    if config.execute.device != "cpu":
        return schedule.step_s
    cores = max(1, available_cores() // config.execute.threads)
    costs = stage_costs(problem, assignment)
    return step_on_cores(
        schedule.name,
        costs.stages,
        costs.links,
        schedule.microbatches,
        cores,
        training=costs.training,
    )


def _engine_peaks(
    real: "RealModel", problem: Problem, assignment: Assignment, schedule: ScheduleResult
) -> dict[int, int]:
    """Return the bytes that the process of each device's stage is predicted to hold."""
    graph, training = real.graph, schedule.training
    peaks = engine_peak_bytes(
        schedule.name,
        engine_stages(problem, assignment),
        schedule.microbatches,
        training=training,
        # The graph of a training step returns the loss, its forward what the engine keeps.
        result_bytes=int(graph.value_bytes[graph.value_is_output].sum()) if training else 0,
    )
    return dict(zip(schedule.devices, peaks, strict=True))


def _pipeline(  # noqa: PLR0917 - what a run is made of, and called once
    config: Config,
    spec: ModelSpec,
    real: "RealModel",
    placed: Assignment,
    peaks: Mapping[int, int],
    predicted_s: float,
) -> Measured:
    from fxpart.execution.microbatches import drawn_microbatches
    from fxpart.execution.pipeline_run import run_pipeline

    execute, chain = config.execute, _chain(real, placed)
    run = run_pipeline(
        chain,
        drawn_microbatches(spec, real, chain, config.microbatches, execute.seed),
        training=config.phase.name == "training",
        schedule=config.schedule.name,
        steps=execute.repeats,
        timeout_s=execute.timeout_s,
        threads=execute.threads,
    )
    homes = [devices[0] for devices in placed.devices_of_partition]
    return Measured(
        way="pipeline",
        time_s=run.step_s,
        runs_s=run.runs_s,
        predicted_s=predicted_s,
        throughput_per_s=run.throughput_per_s,
        unsplit_s=None,
        peak_bytes=run.stage_peak_bytes,
        predicted_peak_bytes=tuple(peaks[home] for home in homes),
        max_difference=run.max_difference,
        gradient_difference=run.gradient_difference,
        device_name=run.device_name,
        threads=run.threads,
    )


def _chain(real: "RealModel", placed: Assignment) -> "Chain":
    from fxpart.pipeline import chain_stages
    from fxpart.split import split_by_assignment

    return chain_stages(split_by_assignment(real.program.module(), real.graph, placed))


def _save(real: "RealModel", chain: "Chain", folder: Path) -> None:
    from fxpart.pipeline.stage_files import save_stages

    save_stages(chain, folder, chain.flat_inputs(real.args, real.kwargs))
