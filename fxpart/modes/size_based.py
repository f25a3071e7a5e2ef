"""`size_based`: fill one device after the other, in graph order, by memory alone.

The rule is that of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with
liveness memory in place of the sum of all tensors.
"""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.evaluate import peak_bytes
from fxpart.graph import IntArray
from fxpart.modes.fill import UNPLACED, fill_in_order
from fxpart.modes.infeasible import does_not_fit
from fxpart.modes.options import NoOptions
from fxpart.modes.single import single_device
from fxpart.modes.units import Units, atomic_units
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem

__all__ = ["size_based", "size_based_devices"]


def size_based(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return the model on one device if it fits there, else filled over the devices in order.

    When the devices run out, operators left over go one by one to the device with the least
    memory left that still holds them.

    Raises:
        InfeasibleError: when an operator fits nowhere.

    """
    whole = single_device(problem)
    if whole is not None:
        return whole
    return partition_by_device(problem.graph, size_based_devices(problem))


def size_based_devices(problem: Problem) -> IntArray:
    """Return the device of each operator, filled in order; for the error see `size_based`."""
    units = atomic_units(problem.graph)
    sizes = problem.topology.memory_bytes
    device_of, _, left = fill_in_order(problem.memory, units, [int(size) for size in sizes])
    if left and not _place_rest(problem, units, device_of, left):
        raise does_not_fit(problem)
    return device_of


def _place_rest(problem: Problem, units: Units, device_of: IntArray, left: int) -> bool:
    """Put the last `left` units, one by one, where they leave the least memory free."""
    start, ops = units
    sizes = problem.topology.memory_bytes
    for unit in range(len(start) - 1 - left, len(start) - 1):
        mine = ops[start[unit] : start[unit + 1]]
        best, least = UNPLACED, -1
        for device in range(len(sizes)):
            device_of[mine] = device
            peaks = peak_bytes(problem.memory, device_of, len(sizes))
            free = sizes - peaks
            if (free >= 0).all() and (best == UNPLACED or free[device] < least):
                best, least = device, int(free[device])
        device_of[mine] = best
        if best == UNPLACED:
            return False
    return bool(np.all(device_of != UNPLACED))
