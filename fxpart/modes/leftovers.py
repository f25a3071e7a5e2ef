"""Place a whole model by memory alone: fill in order, then what is left where there is room."""

from collections.abc import Sequence

import numpy as np

from fxpart.cost.kernels import peak_on_device
from fxpart.graph import IntArray
from fxpart.modes.fill import UNPLACED, fill_in_order
from fxpart.modes.units import atomic_units, contiguous_units
from fxpart.problem import Problem

__all__ = ["place_all"]


_MOST_TRIALS = 200_000
"""Largest product of groups and devices for which a second packing is tried: some seconds."""


def place_all(problem: Problem, capacity_bytes: Sequence[int]) -> IntArray | None:
    """Return the device of each operator, or None when no room is found for all.

    Devices are filled one after the other in graph order. When they run out, what is left goes,
    one group of operators at a time, to the device where it leaves the least memory free. If that
    fails, all groups are placed so, those with the largest weights first (best fit decreasing).
    """
    if int(problem.memory.weight_bytes.sum()) > sum(capacity_bytes):
        return None
    device_of, _, left = fill_in_order(
        problem.memory, contiguous_units(problem.graph), capacity_bytes
    )
    if not left:
        return device_of
    start, ops = atomic_units(problem.graph)
    groups = [ops[start[unit] : start[unit + 1]] for unit in range(len(start) - 1)]
    rest = [group for group in groups if device_of[group[0]] == UNPLACED]
    if _place(problem, device_of, rest, capacity_bytes):
        return device_of
    if len(groups) * len(capacity_bytes) > _MOST_TRIALS:
        return None
    # A stable sort: groups without weights, and equal ones, stay in graph order.
    groups.sort(key=lambda group: -_weight_bytes(problem, group))
    device_of = np.full(problem.graph.n_ops, UNPLACED, dtype=np.int64)
    return device_of if _place(problem, device_of, groups, capacity_bytes) else None


def _place(
    problem: Problem, device_of: IntArray, groups: list[IntArray], capacity_bytes: Sequence[int]
) -> bool:
    """Place `groups` in turn; return whether there was room for each."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    for group in groups:
        home = _tightest(problem, device_of, group, capacity_bytes, change)
        if home == UNPLACED:
            return False
        device_of[group] = home
    return True


def _weight_bytes(problem: Problem, group: IntArray) -> int:
    graph = problem.graph
    used = np.unique(np.concatenate([graph.uses_of(int(op)) for op in group]))
    return int(problem.memory.weight_bytes[used].sum())


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
