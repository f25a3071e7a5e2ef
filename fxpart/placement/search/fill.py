"""Fill devices one after the other in graph order, the basis of `size_based`."""

from collections.abc import Callable, Sequence

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.kernels import peak_on_device
from fxpart.cost.least_placement import are_few
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables
from fxpart.placement.device_order import used_weight_bytes
from fxpart.placement.search.units import Units, atomic_units, contiguous_units
from fxpart.support.compiled import compiled

__all__ = ["UNPLACED", "fill_in_order", "place_all"]


UNPLACED = -1


def fill_in_order(
    memory: MemoryTables, units: Units, capacity_bytes: Sequence[int]
) -> tuple[IntArray, int, int]:
    """Return (device of each operator, devices opened, units left over).

    `units` are stretches of the graph order (`contiguous_units`). Each device takes the longest run
    of remaining units whose liveness peak fits. Values read from before a run stay received
    regardless of its length, so a longer run never needs less memory, and it is found by doubling
    and bisection. (In a training step it can need less, in rare cases: then a run that fits is
    taken, although a longer one may fit too.) A device that cannot hold the next unit stays empty.
    Operators of remaining units are `UNPLACED`.
    """
    start, ops = units
    count = len(start) - 1
    device_of = np.full(len(ops), UNPLACED, dtype=np.int64)
    change = np.empty(len(ops) + 1, dtype=np.int64)
    first_left, opened = 0, 0
    for device, capacity in enumerate(capacity_bytes):
        if first_left == count:
            break

        def holds(
            end: int, first: int = first_left, device: int = device, limit: int = capacity
        ) -> bool:
            unit_ops, rest = ops[start[first] : start[end]], ops[start[end] :]
            device_of[unit_ops], device_of[rest] = device, UNPLACED
            return int(peak_on_device(memory, device_of, device, change)) <= limit

        end = _longest(holds, first_left, count)
        holds(end)
        opened = device + 1 if end > first_left else opened
        first_left = end
    return device_of, opened, count - first_left


def _longest(holds: Callable[[int], bool], first: int, count: int) -> int:
    """Return the greatest end for which `holds` is true, assuming that it is monotone."""
    fitting, step = first, 1
    while fitting < count and holds(min(fitting + step, count)):
        fitting = min(fitting + step, count)
        step *= 2
    failing = min(fitting + step, count + 1)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if holds(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


# Place a whole model by memory only: fill in order, then put the rest wherever it fits.

_MOST_TRIALS = 200_000
"""Largest product of groups and devices for which a second packing is tried (several seconds)."""


def place_all(problem: Problem, capacity_bytes: Sequence[int]) -> IntArray | None:
    """Return the device of each operator, or None if no placement is found that fits.

    Devices are filled one after the other in graph order. If operators remain, their groups go one
    at a time to the device where they leave the least memory free. If that fails, all groups are
    placed by best fit decreasing of weights; or, if there are few, all placements are enumerated
    until one fits.
    """
    if used_weight_bytes(problem) > sum(capacity_bytes):
        return None
    device_of, _, remaining_units = fill_in_order(
        problem.memory, contiguous_units(problem.graph), capacity_bytes
    )
    if not remaining_units:
        return device_of
    start, ops = atomic_units(problem.graph)
    groups = [ops[start[unit] : start[unit + 1]] for unit in range(len(start) - 1)]
    remaining_groups = [group for group in groups if device_of[group[0]] == UNPLACED]
    if _place(problem, device_of, remaining_groups, capacity_bytes):
        return device_of
    if are_few(problem, len(groups)):
        # If operators are few, all placements are tried, so that no feasible model is refused.
        capacity = np.array(capacity_bytes, dtype=np.int64)
        fits = _first_that_fits(problem.memory, start, ops, capacity, device_of)
        return device_of if fits else None
    if len(groups) * len(capacity_bytes) > _MOST_TRIALS:
        return None
    # A stable sort keeps groups of equal weights in graph order.
    groups.sort(key=lambda group: -_weight_bytes(problem, group))
    device_of = np.full(problem.graph.n_ops, UNPLACED, dtype=np.int64)
    return device_of if _place(problem, device_of, groups, capacity_bytes) else None


@compiled
def _first_that_fits(
    m: MemoryTables, start: IntArray, ops: IntArray, capacity: IntArray, device_of: IntArray
) -> bool:
    """Set `device_of` (n,) to the first placement of the units that fits; return whether one does.

    Placements are enumerated as numbers with a digit per unit. Partial placements are not pruned by
    memory, since another operator can reduce a device's memory, such as the producer of a received
    view.
    """
    units, devices = start.shape[0] - 1, capacity.shape[0]
    digits = np.zeros(units, dtype=np.int64)
    change = np.empty(device_of.shape[0] + 1, dtype=np.int64)
    while True:
        for unit in range(units):
            for i in range(start[unit], start[unit + 1]):
                device_of[ops[i]] = digits[unit]
        device = 0
        while device < devices and peak_on_device(m, device_of, device, change) <= capacity[device]:
            device += 1
        if device == devices:
            return True
        unit = 0
        while unit < units and digits[unit] == devices - 1:
            digits[unit] = 0
            unit += 1
        if unit == units:
            return False
        digits[unit] += 1


def _place(
    problem: Problem, device_of: IntArray, groups: list[IntArray], capacity_bytes: Sequence[int]
) -> bool:
    """Place `groups` in order; return whether all fit."""
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
    unit_ops: IntArray,
    capacity_bytes: Sequence[int],
    change: IntArray,
) -> int:
    """Return the device that fits `unit_ops` with the least free memory, or `UNPLACED`.

    Only the receiving device grows, since others send and receive the same values.
    """
    best, least_free = UNPLACED, 0
    for device, capacity in enumerate(capacity_bytes):
        device_of[unit_ops] = device
        free = capacity - int(peak_on_device(problem.memory, device_of, device, change))
        if free >= 0 and (best == UNPLACED or free < least_free):
            best, least_free = device, free
    device_of[unit_ops] = UNPLACED
    return best
