"""The compiled inner loop of the searches: try units on every device, keep what is faster.

A change is first estimated, at the cost of what it touches (`fxpart.cost.incremental`); only one
that looks faster is simulated whole, and only if it is faster is its memory counted.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.incremental import Progress, estimate, refresh
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.placement.search.units import Units
from fxpart.support.compiled import compiled, inlined

__all__ = ["SearchTables", "home_of", "improve", "refreshed"]

SWAPS_TRIED = 8
"""Partners tried for a move that is faster but too large: the nearest on the target device."""

FARTHEST = 4096
"""Units between a move and the partners tried for it, at most."""


class SearchTables(NamedTuple):
    """What the search reads, and room for it to work in."""

    costs: CostTables
    memory: MemoryTables
    sizes: IntArray
    """Memory of each device in bytes, shape (D,)."""
    progress: Progress
    """The placement so far, simulated."""
    log: ScheduleLog
    """Room for one simulation."""
    min_gain: float
    """Share of the latency that a change must save to be made."""
    kind: IntArray
    """Devices with the same number are alike in speed, memory and links, shape (D,)."""
    used: IntArray
    """Operators on each device, kept up to date, shape (D,)."""
    change: IntArray
    """Room for a memory profile, shape (n + 1,)."""


@compiled
def refreshed(s: SearchTables, device_of: IntArray) -> float:
    """Simulate the placement whole, count its operators, and return its latency."""
    s.used[:] = 0
    for op in range(device_of.shape[0]):
        s.used[device_of[op]] += 1
    return refresh(s.costs, device_of, s.progress)


@compiled
def _fits(s: SearchTables, device_of: IntArray, device: int) -> bool:
    return bool(peak_on_device(s.memory, device_of, device, s.change) <= s.sizes[device])


@compiled
def _put(units: Units, unit: int, device_of: IntArray, device: int) -> None:
    start, ops = units
    for i in range(start[unit], start[unit + 1]):
        device_of[ops[i]] = device


@inlined
def _put_back(device_of: IntArray, unit_ops: IntArray, was: IntArray) -> None:
    # One by one: numba takes seconds to compile the assignment of an array to a part of another.
    for i in range(unit_ops.shape[0]):
        device_of[unit_ops[i]] = was[i]


@compiled
def home_of(units: Units, unit: int, device_of: IntArray) -> int:
    """Return the device of all the unit's operators, or -1 when they are on several."""
    start, ops = units
    device = device_of[ops[start[unit]]]
    for i in range(start[unit] + 1, start[unit + 1]):
        if device_of[ops[i]] != device:
            return -1
    return int(device)


@inlined
def _fits_after(s: SearchTables, device_of: IntArray, was: IntArray, device: int) -> bool:
    """Return whether every device that a move to `device` touches holds what it then has.

    Others send and receive the same values as before, at the same places in the order. The devices
    left behind may grow too: what they made themselves they may have to receive now.
    """
    if not _fits(s, device_of, device):
        return False
    for i in range(was.shape[0]):
        # Operators of a unit mostly share a home: one look at each.
        if (
            was[i] != device
            and (i == 0 or was[i] != was[i - 1])
            and not _fits(s, device_of, was[i])
        ):
            return False
    return True


@inlined
def _swap_partner(
    s: SearchTables,
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
    start, ops = units
    count = start.shape[0] - 1
    best, latency, tried = -1, most, 0
    for step in range(2, 2 * min(count, FARTHEST)):
        other = unit + (step // 2 if step % 2 == 0 else -(step // 2))
        if other < 0 or other >= count or home_of(units, other, device_of) != target:
            continue
        if tried == SWAPS_TRIED:
            break
        tried += 1
        _put(units, other, device_of, source)
        first = min(ops[start[unit]], ops[start[other]])
        last = max(ops[start[unit + 1] - 1], ops[start[other + 1] - 1])
        if estimate(s.costs, device_of, s.progress, first, last)[0] < latency:
            latency_s, _ = schedule(s.costs, device_of, s.log)
            if latency_s < latency and _fits(s, device_of, target) and _fits(s, device_of, source):
                best, latency = other, latency_s
        _put(units, other, device_of, target)
    return best, latency


@inlined
def _estimates(
    s: SearchTables, device_of: IntArray, units: Units, unit: int, home: int
) -> FloatArray:
    """Return about the latency with the unit on each device; infinite where it need not be tried.

    Idle devices of one kind all give the same: the first stands for them.
    """
    start, ops = units
    unit_ops = ops[start[unit] : start[unit + 1]]
    was = device_of[unit_ops]
    devices = s.sizes.shape[0]
    estimates = np.full(devices, np.inf)
    idle_tried = np.zeros(devices, dtype=np.bool_)
    for device in range(devices):
        if device == home or (s.used[device] == 0 and idle_tried[s.kind[device]]):
            continue
        idle_tried[s.kind[device]] |= s.used[device] == 0
        _put(units, unit, device_of, device)
        estimates[device], _, _ = estimate(
            s.costs, device_of, s.progress, unit_ops[0], unit_ops[-1]
        )
    _put_back(device_of, unit_ops, was)
    return estimates


@inlined
def _is_critical(s: SearchTables, units: Units, unit: int) -> bool:
    """Return whether a longest path goes through the unit: without, no move of it gains."""
    start, ops = units
    return bool(s.progress.critical[ops[start[unit] : start[unit + 1]]].any())


@inlined
def _try_unit(
    s: SearchTables, device_of: IntArray, units: Units, unit: int, latency: float
) -> float:
    """Make the best move or swap of one unit if it lowers `latency`; return the latency then."""
    start, ops = units
    unit_ops = ops[start[unit] : start[unit + 1]]
    was = device_of[unit_ops]
    home = home_of(units, unit, device_of)
    best, best_device, best_partner = latency * (1.0 - s.min_gain), -1, -1
    estimated = _estimates(s, device_of, units, unit, home)
    for device in np.argsort(estimated, kind="mergesort"):
        if estimated[device] >= best:
            break
        _put(units, unit, device_of, device)
        latency_s, _ = schedule(s.costs, device_of, s.log)
        if latency_s < best:
            if _fits_after(s, device_of, was, device):
                best, best_device, best_partner = latency_s, device, -1
            elif home >= 0:
                move = (unit, home, int(device))
                partner, swapped = _swap_partner(s, device_of, units, move, best)
                if partner >= 0:
                    best, best_device, best_partner = swapped, device, partner
        _put_back(device_of, unit_ops, was)
    if best_device < 0:
        return latency
    _put(units, unit, device_of, best_device)
    if best_partner >= 0:
        _put(units, best_partner, device_of, home)
    return refreshed(s, device_of)


@compiled
def improve(s: SearchTables, device_of: IntArray, units: Units, max_passes: int) -> float:
    """Change `device_of` while a move or swap of a unit lowers the latency; return the latency.

    `device_of` must fit at the start, and fits at the end. Only units on a longest path are tried;
    the search ends with the first pass that changes nothing.
    """
    latency = refreshed(s, device_of)
    for _ in range(max_passes):
        before = latency
        for unit in range(units[0].shape[0] - 1):
            if _is_critical(s, units, unit):
                latency = _try_unit(s, device_of, units, unit, latency)
        if latency >= before:
            break
    return latency
