"""Fill devices one after the other in graph order: the start of `size_based`."""

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

    `units` are stretches of the graph's order (`contiguous_units`). Each device takes the longest
    run of them, from the first that no device has yet, whose liveness peak it can hold. All that a
    run reads from before it stays received however long the run, so a longer one never needs less
    memory, and it is found by doubling and halving. (In a training step it can need less, in rare
    cases: then a run that fits is taken, of which a longer one may fit too.) A device that cannot
    hold the next unit stays empty. Operators of units left over are `UNPLACED`.
    """
    start, ops = units
    count = len(start) - 1
    device_of = np.full(len(ops), UNPLACED, dtype=np.int64)
    change = np.empty(len(ops) + 1, dtype=np.int64)
    done, opened = 0, 0
    for device, capacity in enumerate(capacity_bytes):
        if done == count:
            break

        def holds(end: int, first: int = done, device: int = device, most: int = capacity) -> bool:
            unit_ops, rest = ops[start[first] : start[end]], ops[start[end] :]
            device_of[unit_ops], device_of[rest] = device, UNPLACED
            return int(peak_on_device(memory, device_of, device, change)) <= most

        end = _longest(holds, done, count)
        holds(end)
        opened = device + 1 if end > done else opened
        done = end
    return device_of, opened, count - done


def _longest(holds: Callable[[int], bool], first: int, count: int) -> int:
    """Return the greatest end for which `holds` is true, given that it holds up to some point."""
    good, step = first, 1
    while good < count and holds(min(good + step, count)):
        good = min(good + step, count)
        step *= 2
    bad = min(good + step, count + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


# Place a whole model by memory alone: fill in order, then put what is left where it fits.

_MOST_TRIALS = 200_000
"""Largest product of groups and devices for which a second packing is tried: some seconds."""


def place_all(problem: Problem, capacity_bytes: Sequence[int]) -> IntArray | None:
    """Return the device of each operator, or None when no room is found for all.

    Devices are filled one after the other in graph order. When they run out, what is left goes,
    one group of operators at a time, to the device where it leaves the least memory free. If that
    fails, all groups are placed so, those with the largest weights first (best fit decreasing); or,
    where there are few, in every way until one fits.
    """
    if used_weight_bytes(problem) > sum(capacity_bytes):
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
    if are_few(problem, len(groups)):
        # Of few operators all placements are looked at, so that none is refused that fits.
        capacity = np.array(capacity_bytes, dtype=np.int64)
        fits = _first_that_fits(problem.memory, start, ops, capacity, device_of)
        return device_of if fits else None
    if len(groups) * len(capacity_bytes) > _MOST_TRIALS:
        return None
    # A stable sort: groups without weights, and equal ones, stay in graph order.
    groups.sort(key=lambda group: -_weight_bytes(problem, group))
    device_of = np.full(problem.graph.n_ops, UNPLACED, dtype=np.int64)
    return device_of if _place(problem, device_of, groups, capacity_bytes) else None


@compiled
def _first_that_fits(
    m: MemoryTables, start: IntArray, ops: IntArray, capacity: IntArray, device_of: IntArray
) -> bool:
    """Set `device_of` (n,) to the first placement of the units that fits; return if there is one.

    Placements are counted through as numbers with a digit for each unit. Nothing is left out for
    what part of a placement holds: an operator more can make a device hold less, such as the maker
    of a view that was received.
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
    unit_ops: IntArray,
    capacity_bytes: Sequence[int],
    change: IntArray,
) -> int:
    """Return the device that takes `unit_ops` with the least memory to spare, or `UNPLACED`.

    Only the device that takes an operator grows: others see the same values sent or received.
    """
    best, least = UNPLACED, 0
    for device, capacity in enumerate(capacity_bytes):
        device_of[unit_ops] = device
        free = capacity - int(peak_on_device(problem.memory, device_of, device, change))
        if free >= 0 and (best == UNPLACED or free < least):
            best, least = device, free
    device_of[unit_ops] = UNPLACED
    return best
