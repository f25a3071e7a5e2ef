"""Place a whole model by memory alone: fill in order, then what is left where there is room."""

from collections.abc import Sequence

import numpy as np

from fxpart.cost.kernels import peak_on_device
from fxpart.graph import IntArray
from fxpart.modes.fill import UNPLACED, fill_in_order
from fxpart.modes.units import atomic_units, contiguous_units
from fxpart.problem import Problem

__all__ = ["place_all"]


def place_all(problem: Problem, capacity_bytes: Sequence[int]) -> IntArray | None:
    """Return the device of each operator, or None when an operator finds no room.

    Devices are filled one after the other in graph order. When they run out, what is left goes,
    one group of operators at a time, to the device where it leaves the least memory free.
    """
    device_of, _, left = fill_in_order(
        problem.memory, contiguous_units(problem.graph), capacity_bytes
    )
    if not left:
        return device_of
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    start, ops = atomic_units(problem.graph)
    for unit in range(len(start) - 1):
        mine = ops[start[unit] : start[unit + 1]]
        if device_of[mine[0]] == UNPLACED:
            home = _tightest(problem, device_of, mine, capacity_bytes, change)
            if home == UNPLACED:
                return None
            device_of[mine] = home
    return device_of


def _tightest(
    problem: Problem,
    device_of: IntArray,
    mine: IntArray,
    capacity_bytes: Sequence[int],
    change: IntArray,
) -> int:
    """Return the device that holds `mine` as well with the least memory to spare, or `UNPLACED`.

    Only the device that takes an operator grows: others see the same values sent or received.
    """
    best, least = UNPLACED, 0
    for device, capacity in enumerate(capacity_bytes):
        device_of[mine] = device
        free = capacity - int(peak_on_device(problem.memory, device_of, device, change))
        if free >= 0 and (best == UNPLACED or free < least):
            best, least = device, free
    device_of[mine] = UNPLACED
    return best
