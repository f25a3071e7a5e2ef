"""The compiled inner loop of the searches: try units on every device, keep improvements.

A change is first estimated incrementally (`fxpart.cost.incremental`); only if it looks faster is it
fully simulated, and only if it is faster is its memory evaluated.
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
"""Nearest units on the target device tried as swap partners if a faster move does not fit."""

FARTHEST = 4096
"""Largest distance in units between a move and its swap partners."""


class SearchTables(NamedTuple):
    """Tables and scratch space of the search."""

    costs: CostTables
    memory: MemoryTables
    sizes: IntArray
    """Memory of each device in bytes, shape (D,)."""
    progress: Progress
    """Simulation state of the current placement."""
    log: ScheduleLog
    """Scratch space for one simulation."""
    min_gain: float
    """Smallest relative improvement of the latency for a change to be made."""
    kind: IntArray
    """Class of interchangeable devices of each device, shape (D,)."""
    used: IntArray
    """Number of operators on each device, shape (D,)."""
    change: IntArray
    """Scratch space for a memory profile, shape (n + 1,)."""


@compiled
def refreshed(s: SearchTables, device_of: IntArray) -> float:
    """Fully simulate the placement, count operators per device, and return the latency."""
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
def _restore(device_of: IntArray, unit_ops: IntArray, old_devices: IntArray) -> None:
    # Element by element, since numba takes seconds to compile fancy assignment.
    for i in range(unit_ops.shape[0]):
        device_of[unit_ops[i]] = old_devices[i]


@compiled
def home_of(units: Units, unit: int, device_of: IntArray) -> int:
    """Return the device of all the unit's operators, or -1 if they are on several."""
    start, ops = units
    device = device_of[ops[start[unit]]]
    for i in range(start[unit] + 1, start[unit + 1]):
        if device_of[ops[i]] != device:
            return -1
    return int(device)


@inlined
def _fits_after(s: SearchTables, device_of: IntArray, old_devices: IntArray, device: int) -> bool:
    """Return whether all devices affected by a move to `device` still fit.

    Other devices send and receive the same values as before, at the same points. Source devices may
    grow too, since they may now have to receive values that they produced before.
    """
    if not _fits(s, device_of, device):
        return False
    for i in range(old_devices.shape[0]):
        # Operators of a unit usually share a device, so skip repeats.
        if (
            old_devices[i] != device
            and (i == 0 or old_devices[i] != old_devices[i - 1])
            and not _fits(s, device_of, old_devices[i])
        ):
            return False
    return True


@inlined
def _swap_partner(
    s: SearchTables,
    device_of: IntArray,
    units: Units,
    move: tuple[int, int, int],
    limit_s: float,
) -> tuple[int, float]:
    """Return the unit to swap back after `move` (unit, source, target) or -1, and the latency.

    The move has been made and overfills the target. The nearest units on the target are tried
    outwards in graph order; a swap must fit and have a latency below `limit_s`.
    """
    unit, source, target = move
    start, ops = units
    count = start.shape[0] - 1
    best, latency, tried = -1, limit_s, 0
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
        if estimate(s.costs, device_of, s.progress, first, last, latency)[0] < latency:
            latency_s, _ = schedule(s.costs, device_of, s.log)
            if latency_s < latency and _fits(s, device_of, target) and _fits(s, device_of, source):
                best, latency = other, latency_s
        _put(units, other, device_of, target)
    return best, latency


@inlined
def _estimates(  # noqa: PLR0917 - compiled: all by position
    s: SearchTables, device_of: IntArray, units: Units, unit: int, home: int, limit_s: float
) -> FloatArray:
    """Return the estimated latency with the unit on each device; infinite if not worth trying.

    That is if it exceeds `limit_s`; and of idle devices of one kind only the first is tried, as all
    give the same.
    """
    start, ops = units
    unit_ops = ops[start[unit] : start[unit + 1]]
    previous = device_of[unit_ops]
    devices = s.sizes.shape[0]
    estimates = np.full(devices, np.inf)
    idle_tried = np.zeros(devices, dtype=np.bool_)
    for device in range(devices):
        if device == home or (s.used[device] == 0 and idle_tried[s.kind[device]]):
            continue
        idle_tried[s.kind[device]] |= s.used[device] == 0
        _put(units, unit, device_of, device)
        estimates[device], _, _ = estimate(
            s.costs, device_of, s.progress, unit_ops[0], unit_ops[-1], limit_s
        )
    _restore(device_of, unit_ops, previous)
    return estimates


@inlined
def _is_critical(s: SearchTables, units: Units, unit: int) -> bool:
    """Return whether a critical path goes through the unit; otherwise no move of it helps."""
    start, ops = units
    return bool(s.progress.critical[ops[start[unit] : start[unit + 1]]].any())


@inlined
def _try_unit(
    s: SearchTables, device_of: IntArray, units: Units, unit: int, latency: float
) -> bool:
    """Make the best move or swap of `unit`; return whether one lowers `latency`."""
    start, ops = units
    unit_ops = ops[start[unit] : start[unit + 1]]
    previous = device_of[unit_ops]
    home = home_of(units, unit, device_of)
    best, best_device, best_partner = latency * (1.0 - s.min_gain), -1, -1
    estimated = _estimates(s, device_of, units, unit, home, best)
    while True:
        # The first of the least. A sort would take numba seconds to compile.
        device = int(np.argmin(estimated))
        if estimated[device] >= best:
            break
        estimated[device] = np.inf
        _put(units, unit, device_of, device)
        latency_s, _ = schedule(s.costs, device_of, s.log)
        if latency_s < best:
            if _fits_after(s, device_of, previous, device):
                best, best_device, best_partner = latency_s, device, -1
            elif home >= 0:
                partner, swapped = _swap_partner(s, device_of, units, (unit, home, device), best)
                if partner >= 0:
                    best, best_device, best_partner = swapped, device, partner
        _restore(device_of, unit_ops, previous)
    if best_device < 0:
        return False
    _put(units, unit, device_of, best_device)
    if best_partner >= 0:
        _put(units, best_partner, device_of, home)
    return True


@compiled
def _first_change(
    s: SearchTables, device_of: IntArray, units: Units, first: int, latency: float
) -> int:
    """Move or swap one unit, the first from `first` on that gains by it.

    Returns that unit, or the number of units if there is none.
    """
    count = units[0].shape[0] - 1
    for unit in range(first, count):
        if _is_critical(s, units, unit) and _try_unit(s, device_of, units, unit, latency):
            return unit
    return int(count)


def improve(s: SearchTables, device_of: IntArray, units: Units, max_passes: int) -> float:
    """Improve `device_of` while a move or swap of a unit lowers the latency; return the latency.

    `device_of` must fit at the start, and fits at the end. Only units on a critical path are tried;
    the search ends after a pass without changes.
    """
    latency = refreshed(s, device_of)
    count = len(units[0]) - 1
    for _ in range(max_passes):
        latency_before = latency
        unit = _first_change(s, device_of, units, 0, latency)
        while unit < count:
            latency = refreshed(s, device_of)
            unit = _first_change(s, device_of, units, unit + 1, latency)
        if latency >= latency_before:
            break
    return latency
