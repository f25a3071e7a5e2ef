"""`single`: the whole model on one device."""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.device_order import fastest_first, speed_order
from fxpart.placement.infeasible import describe_devices, describe_reserve, whole_model_bytes
from fxpart.placement.options import NoOptions

__all__ = ["devices_that_hold_all", "single", "single_device"]


def devices_that_hold_all(problem: Problem) -> list[int]:
    """Return the devices that hold the whole model, fastest first, then largest.

    Of devices equal in both, only the first is returned.
    """
    needed, sizes = whole_model_bytes(problem), problem.topology.memory_bytes
    total_s = problem.costs.op_time_s.sum(axis=0)
    first_of = {(float(total_s[d]), int(sizes[d])): d for d in reversed(speed_order(problem))}
    ranked = sorted(first_of.items(), key=lambda entry: (entry[0][0], -entry[0][1]))
    return [device for (_, size), device in ranked if size >= needed]


def single_device(problem: Problem) -> Assignment | None:
    """Place everything on the fastest device that holds it, or return None if none does.

    Ties go to the device with the most memory.
    """
    holding = devices_that_hold_all(problem)
    if not holding:
        return None
    return Assignment(np.zeros(problem.graph.n_ops, dtype=np.int64), ((holding[0],),))


@fastest_first
def single(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Place everything on the fastest device that holds it; ties go to the largest.

    Raises:
        InfeasibleError: if no device holds it.

    """
    assignment = single_device(problem)
    if assignment is None:
        memory = [device.memory_bytes for device in problem.topology.devices]
        needed = whole_model_bytes(problem)
        holder = f"largest of the devices {describe_devices(memory)}"
        if len(memory) == 1:
            holder = "device"
        raise InfeasibleError(
            f"single: the model needs {show_bytes(needed)} ({needed} bytes), the {holder} has"
            f" {show_bytes(max(memory))}"
            f" ({max(memory)} bytes){describe_reserve(problem.topology.devices)};"
            " take a larger device, or mode=size_based or mode=kl_based over several",
            needed_bytes=needed,
            available_bytes=max(memory),
        )
    return assignment
