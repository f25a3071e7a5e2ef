"""The schedule of a pipeline that a configuration asks for."""

from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.core.topology import DeviceSpec
from fxpart.cost.all_reduce import AllReduce
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, NotApplicableError, SpecError, nearest_names, show_bytes
from fxpart.placement.infeasible import describe_reserve
from fxpart.schedule import SCHEDULES, ScheduleResult, simulate_schedule, stage_costs
from fxpart.schedule.costs import PipelineCosts
from fxpart.schedule.orders import MOST_ACTIONS
from runner.config.sections import Config
from runner.output.terminal import counted, rate_text
from runner.output.units import GIB, format_s, format_size

__all__ = ["check_schedule", "schedule_line", "schedule_metrics", "scheduled"]


def check_schedule(config: Config) -> None:
    """Raise `SpecError` for a schedule that does not exist, or numbers that it cannot have."""
    name = config.schedule.name
    if name != "none" and name not in SCHEDULES:
        near = nearest_names(name, ["none", *SCHEDULES])
        raise SpecError(f"schedule={name} does not exist; {near}")
    if config.microbatches < 1:
        raise SpecError(f"microbatches={config.microbatches} must be 1 or more")
    if config.microbatches > MOST_ACTIONS:
        raise SpecError(
            f"microbatches={config.microbatches} is more than can be simulated, at most"
            f" {MOST_ACTIONS}; take fewer, larger ones"
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
    config: Config, problem: Problem, assignment: Assignment, sums: AllReduce | None = None
) -> ScheduleResult | None:
    """Return the simulated pipeline, or None without a schedule.

    `sums` is what replicas sum: gradients and results once a step, when a device has run all;
    values inside the model for each microbatch, in its forward.

    Raises:
        SpecError: for an assignment that is no chain of stages.
        InfeasibleError: when the microbatches in flight do not fit a device.

    """
    name = config.schedule.name
    if name == "none":
        return None
    costs = stage_costs(problem, assignment)
    if sums is not None:
        costs = _with_sums(costs, sums)
    result = simulate_schedule(name, costs, config.microbatches)
    memory_bytes = problem.topology.memory_bytes
    for device, peak in zip(result.devices, result.peak_bytes, strict=True):
        if peak > memory_bytes[device]:
            raise _does_not_fit(result, problem.topology.devices[device], device, peak)
    return result


def _with_sums(costs: PipelineCosts, sums: AllReduce) -> PipelineCosts:
    """Return `costs` with the sums of each device added to its first stage."""
    within_s, reduce_s = sums.within_s.tolist(), (sums.busy_s - sums.within_s).tolist()
    stages = list(costs.stages)
    for device in dict.fromkeys(stage.device for stage in stages):
        first = next(i for i, stage in enumerate(stages) if stage.device == device)
        stages[first] = replace(stages[first], within_s=within_s[device], reduce_s=reduce_s[device])
    return replace(costs, stages=tuple(stages))


def _does_not_fit(
    result: ScheduleResult, spec: DeviceSpec, device: int, peak: int
) -> InfeasibleError:
    # A forward pass keeps nothing for a backward, so that another order changes little.
    order_helps = result.training and result.name != "1f1b"
    order = ", schedule=1f1b, which keeps fewer activations," if order_helps else ","
    return InfeasibleError(
        f"schedule={result.name} with {counted(result.microbatches, 'microbatch', 'microbatches')}"
        f" holds {show_bytes(peak)} ({peak} bytes) on device {device}, which has"
        f" {show_bytes(spec.memory_bytes)} ({spec.memory_bytes} bytes){describe_reserve([spec])};"
        f" take smaller microbatches, fewer of them{order} more stages, or larger devices",
        needed_bytes=peak,
        available_bytes=spec.memory_bytes,
    )


def schedule_line(result: ScheduleResult, batch_size: int = 1) -> str:
    """Return the outcome of a schedule in one line; a microbatch has `batch_size` examples."""
    work = "training step" if result.training else "step"
    return (
        f"{result.name}: {work} {format_s(result.step_s)} for"
        f" {counted(result.microbatches, 'microbatch', 'microbatches')},"
        f" {rate_text(result.throughput_per_s * batch_size)},"
        f" bubble {result.bubble_fraction:.1%}, peak {format_size(max(result.peak_bytes))}"
    )


def schedule_metrics(result: ScheduleResult) -> dict[str, float]:
    """Return the metrics of a schedule by name."""
    return {
        "step_ms": result.step_s * 1e3,
        "bubble_pct": result.bubble_fraction * 100,
        "schedule_peak_gib": max(result.peak_bytes) / GIB,
    }
