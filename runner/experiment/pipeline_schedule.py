"""The pipeline schedule of a configuration: its checks, simulation and report."""

from collections.abc import Sequence
from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.core.topology import DeviceSpec
from fxpart.cost.all_reduce import AllReduce
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, NotApplicableError, SpecError, nearest_names, show_bytes
from fxpart.placement.infeasible import describe_reserve
from fxpart.schedule import (
    SCHEDULES,
    ScheduleResult,
    ordered_actions,
    simulate_schedule,
    stage_costs,
)
from fxpart.schedule.costs import PipelineCosts
from fxpart.schedule.orders import MOST_ACTIONS
from fxpart.schedule.stage_shards import WeightShards
from runner.config.schema import Config
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = ["check_schedule", "schedule_line", "schedule_metrics", "scheduled"]


def check_schedule(config: Config) -> None:
    """Raise `SpecError` if the schedule is unknown, or conflicts with other settings."""
    name = config.schedule.name
    if name != "none" and name not in SCHEDULES:
        suggestion = nearest_names(name, ["none", *SCHEDULES])
        raise SpecError(f"schedule={name} does not exist; {suggestion}")
    if config.microbatches < 1:
        raise SpecError(f"microbatches={config.microbatches} must be 1 or more")
    if config.microbatches > MOST_ACTIONS:
        raise SpecError(
            f"microbatches={config.microbatches} is more than can be simulated (at most "
            f"{MOST_ACTIONS}); use fewer, larger microbatches"
        )
    if name == "none" and config.microbatches > 1:
        raise NotApplicableError(
            f"microbatches={config.microbatches} needs a schedule; add schedule=gpipe, 1f1b or"
            " interleaved"
        )
    if name != "none" and config.devices.saturate_host:
        raise NotApplicableError(
            f"schedule={name} runs one pipeline, and devices.saturate_host=true copies it; leave"
            " one of the two out"
        )


def scheduled(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    sums: AllReduce | None = None,
    *,
    gathers_s: Sequence[float] = (),
    waits_s: float = 0.0,
    shards: WeightShards | None = None,
) -> ScheduleResult | None:
    """Simulate the pipeline schedule; return None without one.

    Args:
        config: the schedule and its number of microbatches.
        problem: the placement problem.
        assignment: its stages.
        sums: the all-reduces over replicas: of gradients and results once a step, after a device's
            last action, and of values inside the model in the forward of each microbatch.
        gathers_s: the time each device takes to gather the weights updated by other replicas, after
            its own updates.
        waits_s: the time a microbatch waits for collectives, if each one gathers weights and
            scatters gradients.
        shards: the weights that stages gather on demand.

    Raises:
        SpecError: if the assignment is not a chain of stages.
        InfeasibleError: if the microbatches in flight do not fit a device.

    """
    name = config.schedule.name
    if name == "none":
        return None
    costs = stage_costs(problem, assignment, shards)
    if sums is not None:
        costs = _with_sums(costs, sums)
    if gathers_s:
        costs = _with_gathers(costs, gathers_s)
    if waits_s:
        (stage,) = costs.stages
        costs = replace(costs, stages=(replace(stage, backward_s=stage.backward_s + waits_s),))
    result = simulate_schedule(name, costs, config.microbatches)
    memory_bytes = problem.topology.memory_bytes
    for device, peak in zip(result.devices, result.peak_bytes, strict=True):
        if peak > memory_bytes[device]:
            raise _does_not_fit(result, costs, problem.topology.devices[device], device, peak)
    return result


def _with_sums(costs: PipelineCosts, sums: AllReduce) -> PipelineCosts:
    """Return `costs` with the all-reduces of each device added to its first stage."""
    within_s, reduce_s = sums.within_s.tolist(), (sums.busy_s - sums.within_s).tolist()
    stages = list(costs.stages)
    for device in dict.fromkeys(stage.device for stage in stages):
        first = next(i for i, stage in enumerate(stages) if stage.device == device)
        added_s = stages[first].reduce_s + reduce_s[device]
        stages[first] = replace(stages[first], within_s=within_s[device], reduce_s=added_s)
    return replace(costs, stages=tuple(stages))


def _with_gathers(costs: PipelineCosts, gathers_s: Sequence[float]) -> PipelineCosts:
    """Return `costs` with the all-gathers of each device after the updates of its last stage."""
    stages = list(costs.stages)
    last = {stage.device: number for number, stage in enumerate(stages)}
    for device, number in last.items():
        update_s = stages[number].update_s + gathers_s[device]
        stages[number] = replace(stages[number], update_s=update_s)
    return replace(costs, stages=tuple(stages))


def _does_not_fit(
    result: ScheduleResult, costs: PipelineCosts, spec: DeviceSpec, device: int, peak: int
) -> InfeasibleError:
    count = counted(result.microbatches, "microbatch", "microbatches")
    return InfeasibleError(
        f"schedule={result.name} with {count} holds {show_bytes(peak)} ({peak} bytes) on device"
        f" {device}: {_held(result, costs, device)}; it has {show_bytes(spec.memory_bytes)}"
        f" ({spec.memory_bytes} bytes){describe_reserve([spec])}",
        needed_bytes=peak,
        available_bytes=spec.memory_bytes,
    )


def _held(result: ScheduleResult, costs: PipelineCosts, device: int) -> str:
    """Return the bytes of a device's weights, activations in flight and inputs, as text."""
    stages = [(i, stage) for i, stage in enumerate(costs.stages) if stage.device == device]
    gathered = sum(stage.shards.whole_bytes for _, stage in stages if stage.shards)
    weights = sum(stage.weight_bytes for _, stage in stages) + gathered
    io_bytes = sum(stage.input_bytes + stage.output_bytes for _, stage in stages)
    saved = sum(stage.saved_bytes for _, stage in stages) if result.training else 0
    rows = ordered_actions(
        result.name,
        len(result.devices),
        len(costs.stages) // len(result.devices),
        result.microbatches,
        training=result.training,
    )
    in_flight, live = 0, 0
    for action in rows[result.devices.index(device)]:
        live += (1 if action.kind == "F" else -1) * (action.stage == stages[0][0])
        in_flight = max(in_flight, live)
    parts = [f"weights and what is kept for them {show_bytes(weights)}"]
    if saved:
        flight = counted(in_flight, "microbatch", "microbatches")
        parts.append(f"activations of {flight} in flight {show_bytes(saved * in_flight)}")
    if io_bytes:
        io_text = show_bytes(io_bytes * result.microbatches)
        parts.append(f"inputs and results of all microbatches {io_text}")
    return ", ".join(parts)


def schedule_line(result: ScheduleResult, rate: str) -> str:
    """Return a line on the result of a schedule; `rate` is the throughput as text."""
    work = "training step" if result.training else "step"
    return (
        f"{result.name}: {work} {format_s(result.step_s)} for"
        f" {counted(result.microbatches, 'microbatch', 'microbatches')},"
        f" {rate},"
        f" bubble {result.bubble_fraction:.1%}, peak {format_size(max(result.peak_bytes))}"
    )


def schedule_metrics(result: ScheduleResult) -> dict[str, float]:
    """Return the metrics of a schedule by name."""
    return {
        "step_ms": result.step_s * 1e3,
        "bubble_pct": result.bubble_fraction * 100,
        "schedule_peak_gib": max(result.peak_bytes) / GIB,
    }
