"""The errors for stages that do not fit, with what would suffice, or that are too many."""

from collections.abc import Sequence

import numpy as np

from fxpart.core.device_spec import MAX_DEVICES
from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError, show_bytes, show_unequal_bytes
from fxpart.placement.infeasible import (
    describe_devices,
    describe_reserve,
    what_is_held,
    whole_model_bytes,
)
from fxpart.placement.stages.contiguous import Slots, StageSolver
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.stretch_bytes import ONE, Flight

__all__ = ["no_cut_fits", "stage_does_not_fit", "too_few_cuts"]


def too_few_cuts(graph: OpGraph, line: StageLine, stages: int) -> SpecError:
    """Return the error for more stages than units, with the operators that forbid most cuts."""
    position = graph.forward_of
    first, last = np.full(graph.n_ops, graph.n_ops), np.full(graph.n_ops, -1)
    np.minimum.at(first, graph.group, position)
    np.maximum.at(last, graph.group, position)
    widest = int(np.argmax(last - first))
    begin, end = int(first[widest]), int(last[widest])
    why = ""
    if end - begin > 1:
        why = (
            f" in its order, since {graph.names[begin]} and {graph.names[end]}, {end - begin}"
            " operators later, must share a device"
        )
    return SpecError(
        f"mode=pipeline was set to {stages} stages, but the model can be cut into "
        f"{line.n_units} at most{why}; use fewer"
        + (", or a mode that does not keep the order, such as mode=cost_aware" if why else "")
    )


def stage_does_not_fit(
    problem: Problem, needed: IntArray, homes: Sequence[int], cut_after: Sequence[str]
) -> InfeasibleError:
    """Return the error for named stages, with the largest shortage of any device.

    Args:
        problem: the problem.
        needed: peak bytes of each device. Shape (D,).
        homes: device of each stage.
        cut_after: modules after which the stages were cut.

    """
    sizes = problem.topology.memory_bytes
    worst = int(np.argmax(needed - sizes))
    need, have = int(needed[worst]), int(sizes[worst])
    stages = [str(stage) for stage, device in enumerate(homes) if device == worst]
    text = f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
    return InfeasibleError(
        f"pipeline: {text} of mode.cut_after={','.join(cut_after)} need{'' if stages[1:] else 's'}"
        f" {show_bytes(need)} ({need} bytes), device {worst}"
        f" ({problem.topology.devices[worst].name}) has {show_bytes(have)} ({have} bytes)"
        f"{describe_reserve([problem.topology.devices[worst]])};"
        f" move the cuts, or let mode.stages={len(homes)} find them",
        needed_bytes=need,
        available_bytes=have,
    )


def no_cut_fits(
    problem: Problem,
    line: StageLine,
    stages: int | None,
    interleave: int = 1,
    flight: Flight = ONE,
) -> InfeasibleError:
    """Return the error for a number of stages, with the number of largest devices that suffices.

    `flight` is that of the stage with the most microbatches in flight.
    """
    devices = problem.topology.devices
    memory = [device.memory_bytes for device in devices[: (stages or len(devices)) // interleave]]
    needed, have = whole_model_bytes(problem), sum(memory)
    request = f"into {stages} stages" if stages else f"into at most {len(devices)} stages"
    on_each = f", {interleave} on each device," if interleave > 1 else ""

    def explanation() -> tuple[str, int | None]:
        enough, change = _what_would_do(problem, line, max(memory), flight)
        contents = f"{what_is_held(problem)}{_flight_text(problem, flight)}"
        return (
            f"pipeline: no cut of the model {request}{on_each} was found to fit: the whole needs"
            f" {show_bytes(needed)} ({needed} bytes, {contents}), the devices of the stages have"
            f" {describe_devices(memory)} ({have} bytes){describe_reserve(devices)}; {change}",
            enough,
        )

    return InfeasibleError(explanation, needed_bytes=needed, available_bytes=have)


def _flight_text(problem: Problem, flight: Flight) -> str:
    """Describe how many microbatches are in flight, if more than one."""
    if flight.in_flight < 2 or problem.graph.first_backward == problem.graph.n_ops:
        return ""
    return f" of one microbatch; the first stage holds activations of {flight.in_flight} in flight"


def _what_would_do(
    problem: Problem, line: StageLine, largest: int, flight: Flight
) -> tuple[int | None, str]:
    """Return the number of stages that suffice on largest devices, and a sentence on it."""
    solver = StageSolver(line, Slots((0,), (largest,), False, (flight,)))
    begin, used = 0, 0
    while begin < line.n_units and used < MAX_DEVICES:
        end = solver.furthest(begin)
        if end == begin:
            name = problem.graph.names[int(line.first_op[begin])]
            module = problem.graph.modules[int(line.first_op[begin])]
            needs, has = show_unequal_bytes(solver.peak_bytes(begin, begin + 1), largest)
            return None, (
                f"operator {name}{f' of {module}' if module else ''}, with what must share its"
                f" stage, alone needs {needs}, the largest device has {has}: take larger devices,"
                " or a smaller batch or sequence"
            )
        begin, used = end, used + 1
    if begin < line.n_units:
        return None, f"it takes more than {MAX_DEVICES} stages of {show_bytes(largest)}"
    return used, (f"{used} stages on devices of {show_bytes(largest)} hold it")
