"""Kernighan-Lin within windows of the graph order: keep the best prefix of chains of moves.

Single moves find only immediate improvements. Here a chain of moves is made, each the best
remaining one even if it increases the cost, with no unit moved twice; then all moves after the best
point are undone. The cost of a chain is estimated within the window, since
`fxpart.cost.incremental` has the heads before it and the tails after it. So a sweep over all
windows takes time linear in the model. Kernighan, Lin: An efficient heuristic procedure for
partitioning graphs. Bell System Technical Journal 49(2), 1970.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.incremental import (
    estimate_from,
    first_affected,
    least_square,
    set_checkpoints,
)
from fxpart.cost.kernels import peak_on_device, schedule
from fxpart.cost.tables import MemoryTables
from fxpart.placement.search.local_search import SearchTables, home_of, refreshed
from fxpart.placement.search.units import Units
from fxpart.support.compiled import compiled, inlined

__all__ = ["WINDOW", "improve_windows"]

WINDOW = 128
"""Operators per window: about a transformer layer and its surroundings."""
DEPTH = 16
"""Longest chain of moves."""
PATIENCE = 3
"""Moves without a new best after which a chain is abandoned."""
SMALL = 4 * WINDOW
"""Most operators for which chains may move non-critical units, to make room for critical ones."""
ROUNDS = 4
"""Most successful chains in one window before moving on."""
TRANSFER_WEIGHT = 1e-3
"""Cost of a second of transfer that delays nothing; breaks ties by less communication."""

SPREAD_WEIGHT = 1e-3
"""Weight of load imbalance, which rewards progress if several equally late units must move."""


class _Window(NamedTuple):
    """The units between two operators, and the free memory of devices."""

    unit: IntArray
    """Units that may move."""
    affected: IntArray
    """First operator that each of them affects."""
    order: IntArray
    """Positions of the units, by that operator, the last one first."""
    first: int
    last: int
    room: IntArray
    """Approximate free bytes of each device, shape (D,)."""
    bytes_of_unit: IntArray
    """Approximate bytes of each unit, shape (U,)."""


@inlined
def _cost(longest: float, sent_s: float, square: float) -> float:
    """Return an estimated latency plus small terms that guide later improvements, in seconds."""
    spread = square / longest if longest > 0.0 else 0.0
    return longest + TRANSFER_WEIGHT * sent_s + SPREAD_WEIGHT * spread


@inlined
def _candidates(s: SearchTables, device_of: IntArray, window: _Window) -> IntArray:
    """Return the devices in the window, and per kind the other device with the most free memory.

    Interchangeable devices that are idle during the window are equivalent for it.
    """
    devices = s.sizes.shape[0]
    chosen = np.zeros(devices, dtype=np.bool_)
    for op in range(window.first, window.last + 1):
        chosen[device_of[op]] = True
    spare = np.full(devices, -1, dtype=np.int64)
    for device in range(devices):
        kind = s.kind[device]
        if not chosen[device] and (
            spare[kind] < 0 or window.room[device] > window.room[spare[kind]]
        ):
            spare[kind] = device
    for kind in range(devices):
        if spare[kind] >= 0:
            chosen[spare[kind]] = True
    return np.flatnonzero(chosen)


@compiled
def _move(units: Units, window: _Window, device_of: IntArray, unit: int, device: int) -> int:
    """Move the unit and update free memory; return its previous device."""
    start, ops = units
    previous = device_of[ops[start[unit]]]
    device_of[ops[start[unit] : start[unit + 1]]] = device
    window.room[previous] += window.bytes_of_unit[unit]
    window.room[device] -= window.bytes_of_unit[unit]
    return int(previous)


@inlined
def _best_step(  # noqa: PLR0917 - compiled: all by position
    s: SearchTables,
    units: Units,
    window: _Window,
    device_of: IntArray,
    free: IntArray,
    limit: float,
) -> tuple[float, int, int]:
    """Return (cost, position in the window, device) of the best move of a free unit.

    While a device is overfull, only its units move. A move that overfills a device is considered
    only if its cost is below `limit`, since another move may then make room. Ties go to the first.
    """
    start, ops = units
    full = int(np.argmin(window.room))
    full = full if window.room[full] < 0 else -1
    best, best_index, best_device = np.inf, -1, -1
    devices = _candidates(s, device_of, window)
    first, last = window.first, window.last
    set_checkpoints(s.costs, device_of, s.progress, first, last)
    for index in window.order:
        unit, affected = window.unit[index], window.affected[index]
        home = device_of[ops[start[unit]]]
        if not free[index] or (full >= 0 and home != full):
            continue
        unchanged = ops[start[unit + 1] - 1] + 1
        spread = SPREAD_WEIGHT * least_square(s.progress, first, last, affected, device_of.shape[0])
        for device in devices:
            if device == home:
                continue
            has_room = window.room[device] >= window.bytes_of_unit[unit]
            most = best if has_room else min(best, limit)
            # A longer latency costs more than `most` even if the load is spread best.
            limit_s = most - spread / most if most > 0.0 else most
            device_of[ops[start[unit] : start[unit + 1]]] = device
            longest, sent_s, square = estimate_from(
                s.costs, device_of, s.progress, first, last, affected, unchanged, limit_s
            )
            cost = _cost(longest, sent_s, square)
            is_best = cost < best or (cost == best and index < best_index)
            if is_best and (cost < limit or has_room):
                best, best_index, best_device = cost, index, device
        device_of[ops[start[unit] : start[unit + 1]]] = home
    return best, best_index, best_device


@inlined
def _movable(s: SearchTables, units: Units, window: _Window, n: int) -> IntArray:
    """Return 1 for the units that a chain may move: in large models, those on a critical path."""
    start, ops = units
    free = np.ones(window.unit.shape[0], dtype=np.int64)
    if n <= SMALL:
        return free
    for index in range(free.shape[0]):
        unit = window.unit[index]
        free[index] = s.progress.critical[ops[start[unit] : start[unit + 1]]].any()
    return free


@compiled
def _chain(s: SearchTables, units: Units, window: _Window, device_of: IntArray) -> bool:
    """Make a chain of moves and keep its best prefix; return whether it is an improvement."""
    free = _movable(s, units, window, device_of.shape[0])
    if free.sum() == 0:
        return False
    first, last = window.first, window.last
    longest, sent_s, square = set_checkpoints(s.costs, device_of, s.progress, first, last)
    best, best_length = _cost(longest, sent_s, square) * (1.0 - 1e-9), 0
    moved = np.zeros((DEPTH, 2), dtype=np.int64)
    count = 0
    while count < min(DEPTH, best_length + PATIENCE):
        cost, index, device = _best_step(s, units, window, device_of, free, best)
        if index < 0 and count > best_length and window.room.min() < 0:
            # Nothing makes room for the last move, so undo it.
            count -= 1
            _move(units, window, device_of, moved[count, 0], moved[count, 1])
            continue
        if index < 0:
            break
        free[index] = 0
        moved[count, 0] = window.unit[index]
        moved[count, 1] = _move(units, window, device_of, window.unit[index], device)
        count += 1
        if cost < best and window.room.min() >= 0:
            best, best_length = cost, count
    for back in range(count - 1, best_length - 1, -1):
        _move(units, window, device_of, moved[back, 0], moved[back, 1])
    return best_length > 0


@compiled
def _units_inside(units: Units, device_of: IntArray, first: int, last: int) -> IntArray:
    """Return the units on one device with all operators between `first` and `last`, in order."""
    start, ops = units
    count = start.shape[0] - 1
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if ops[start[middle]] < first:
            low = middle + 1
        else:
            high = middle
    inside = np.empty(last - first + 1, dtype=np.int64)
    count_inside = 0
    for unit in range(low, count):
        if ops[start[unit]] > last:
            break
        if ops[start[unit + 1] - 1] <= last and home_of(units, unit, device_of) >= 0:
            inside[count_inside] = unit
            count_inside += 1
    return inside[:count_inside]


@compiled
def _affected(
    s: SearchTables, units: Units, inside: IntArray, first: int
) -> tuple[IntArray, IntArray]:
    """Return `affected` and `order` of the window from operator `first` on."""
    start, ops = units
    affected, order = np.empty_like(inside), np.empty_like(inside)
    for index in range(inside.shape[0]):
        unit_ops = ops[start[inside[index]] : start[inside[index] + 1]]
        affected[index] = first_affected(s.costs, s.progress, unit_ops, first)
        # They are nearly in order, and numba takes seconds to compile a sort.
        place = index
        while place > 0 and affected[order[place - 1]] < affected[index]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = index
    return affected, order


@compiled
def _measure_room(s: SearchTables, device_of: IntArray, devices: IntArray, room: IntArray) -> bool:
    """Update the free bytes of `devices`; return whether no device is overfull."""
    for device in devices:
        room[device] = s.sizes[device]
        if s.used[device]:
            room[device] -= peak_on_device(s.memory, device_of, device, s.change)
    return bool(room.min() >= 0)


@compiled
def _bytes_of_units(m: MemoryTables, units: Units) -> IntArray:
    """Return the bytes of each unit's weights and results."""
    start, ops = units
    unit_bytes = np.zeros(start.shape[0] - 1, dtype=np.int64)
    for unit in range(unit_bytes.shape[0]):
        for op in ops[start[unit] : start[unit + 1]]:
            for i in range(m.use_start[op], m.use_start[op + 1]):
                unit_bytes[unit] += m.weight_bytes[m.uses[i]]
            for value in range(m.made_start[op], m.made_start[op + 1]):
                unit_bytes[unit] += m.alloc_bytes[value]
    return unit_bytes


def _improve_window(
    s: SearchTables, units: Units, device_of: IntArray, window: _Window, latency: float
) -> float:
    """Make chains of moves in the window, and keep them if the whole model is faster and fits."""
    first, last = window.first, window.last
    previous = device_of[first : last + 1].copy()
    for _ in range(ROUNDS):
        if not _chain(s, units, window, device_of):
            break
    if (device_of[first : last + 1] == previous).all():
        return latency
    devices = np.union1d(previous, device_of[first : last + 1])
    latency_s, _ = schedule(s.costs, device_of, s.log)
    if latency_s < latency * (1.0 - s.min_gain):
        latency_s = refreshed(s, device_of)
        if _measure_room(s, device_of, devices, window.room):
            return latency_s
    device_of[first : last + 1] = previous
    refreshed(s, device_of)
    _measure_room(s, device_of, devices, window.room)
    return latency


def improve_windows(s: SearchTables, device_of: IntArray, units: Units, max_passes: int) -> float:
    """Improve `device_of` window by window while the latency decreases; return the latency.

    `device_of` must fit at the start, and fits at the end. Units split over devices are not moved.
    Windows overlap by half; one is revisited only if it or a neighbour has changed.
    """
    latency = refreshed(s, device_of)
    n, bytes_of_unit = device_of.shape[0], _bytes_of_units(s.memory, units)
    room = np.empty(s.sizes.shape[0], dtype=np.int64)
    _measure_room(s, device_of, np.arange(room.shape[0]), room)
    stale = np.ones(n // (WINDOW // 2) + 3, dtype=np.bool_)
    for _ in range(max_passes):
        for index in range((n + WINDOW // 2 - 1) // (WINDOW // 2)):
            if not stale[index + 1]:
                continue
            stale[index + 1] = False
            first = index * (WINDOW // 2)
            last = min(first + WINDOW, n) - 1
            inside = _units_inside(units, device_of, first, last)
            affected, order = _affected(s, units, inside, first)
            window = _Window(inside, affected, order, first, last, room, bytes_of_unit)
            improved = _improve_window(s, units, device_of, window, latency)
            if improved < latency:
                latency = improved
                stale[index : index + 3] = True
        if not stale[1:-1].any():
            break
    return latency
