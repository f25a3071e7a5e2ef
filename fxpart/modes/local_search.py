"""The compiled inner loop of `kl_based`: try every unit on every device, keep what is faster."""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.graph import IntArray
from fxpart.modes.units import Units

__all__ = ["SearchTables", "improve"]

SWAPS_TRIED = 8
"""Partners tried for a move that is faster but too large: the nearest on the target device."""


class SearchTables(NamedTuple):
    """What the search reads, and room for it to work in."""

    costs: CostTables
    memory: MemoryTables
    sizes: IntArray
    """Memory of each device in bytes, shape (D,)."""
    log: ScheduleLog
    min_gain: float
    """Share of the latency that a change must save to be made."""
    kind: IntArray
    """Devices with the same number are alike in speed, memory and links, shape (D,)."""
    change: IntArray
    """Room for a memory profile, shape (n + 1,)."""


@compiled
def _operators_on(device_of: IntArray, devices: int) -> IntArray:
    """Return how many operators each device has."""
    count = np.zeros(devices, dtype=np.int64)
    for op in range(device_of.shape[0]):
        count[device_of[op]] += 1
    return count


@compiled
def _fits(m: MemoryTables, sizes: IntArray, device_of: IntArray, change: IntArray) -> bool:
    count = _operators_on(device_of, sizes.shape[0])
    for device in range(sizes.shape[0]):
        if count[device] and peak_on_device(m, device_of, device, change) > sizes[device]:
            return False
    return True


@compiled
def _put(units: Units, unit: int, device_of: IntArray, device: int) -> None:
    start, ops = units
    for i in range(start[unit], start[unit + 1]):
        device_of[ops[i]] = device


@compiled
def _home(units: Units, unit: int, device_of: IntArray) -> int:
    """Return the device of all the unit's operators, or -1 when they are on several."""
    start, ops = units
    device = device_of[ops[start[unit]]]
    for i in range(start[unit] + 1, start[unit + 1]):
        if device_of[ops[i]] != device:
            return -1
    return int(device)


@compiled
def _swap_partner(
    problem: SearchTables,
    device_of: IntArray,
    units: Units,
    move: tuple[int, int, int],
    most: float,
) -> tuple[int, float]:
    """Return the unit to send back after `move` (unit, source, target), and the latency; or -1.

    The move has been made and is too large for the target. Looks outwards from the unit in graph
    order at the nearest units that lie on the target; a swap must fit and take less than `most`.
    """
    unit, source, target = move
    t, m, sizes, log, _, _, change = problem
    count = units[0].shape[0] - 1
    best, latency, tried = -1, most, 0
    for step in range(2, 2 * count):
        other = unit + (step // 2 if step % 2 == 0 else -(step // 2))
        if other < 0 or other >= count or _home(units, other, device_of) != target:
            continue
        if tried == SWAPS_TRIED:
            break
        tried += 1
        _put(units, other, device_of, source)
        found, _ = schedule(t, device_of, log)
        if found < latency and _fits(m, sizes, device_of, change):
            best, latency = other, found
        _put(units, other, device_of, target)
    return best, latency


@compiled
def _try_unit(
    problem: SearchTables, device_of: IntArray, units: Units, unit: int, latency: float
) -> float:
    """Make the best move or swap of one unit if it lowers `latency`; return the latency then."""
    t, m, sizes, log, min_gain, kind, change = problem
    start, ops = units
    mine = ops[start[unit] : start[unit + 1]]
    was = device_of[mine]
    home = _home(units, unit, device_of)
    best, best_device, best_partner = latency * (1.0 - min_gain), -1, -1
    count = _operators_on(device_of, sizes.shape[0])
    idle_tried = np.zeros(sizes.shape[0], dtype=np.bool_)
    for device in range(sizes.shape[0]):
        # Idle devices of one kind all give the same: the first stands for them.
        if device == home or (count[device] == 0 and idle_tried[kind[device]]):
            continue
        idle_tried[kind[device]] |= count[device] == 0
        _put(units, unit, device_of, device)
        found, _ = schedule(t, device_of, log)
        if found < best:
            if _fits(m, sizes, device_of, change):
                best, best_device, best_partner = found, device, -1
            elif home >= 0:
                partner, swapped = _swap_partner(
                    problem, device_of, units, (unit, home, device), best
                )
                if partner >= 0:
                    best, best_device, best_partner = swapped, device, partner
        device_of[mine] = was
    if best_device < 0:
        return latency
    _put(units, unit, device_of, best_device)
    if best_partner >= 0:
        _put(units, best_partner, device_of, home)
    return best


@compiled
def improve(problem: SearchTables, device_of: IntArray, units: Units, max_passes: int) -> float:
    """Change `device_of` while a move or swap of a unit lowers the latency; return the latency.

    `device_of` must fit at the start, and fits at the end. One pass takes units x devices
    simulations; the search ends with the first pass that changes nothing.
    """
    latency, _ = schedule(problem.costs, device_of, problem.log)
    for _ in range(max_passes):
        before = latency
        for unit in range(units[0].shape[0] - 1):
            latency = _try_unit(problem, device_of, units, unit, latency)
        if latency >= before:
            break
    return latency
