"""Kernighan and Lin inside a window of the graph's order: chains of moves, the best prefix kept.

One move at a time finds only what pays at once. Here moves are made one after the other, each the
best that is left though it may cost something, no unit twice; then all after the best point are
taken back. What such a chain costs is seen from the window alone: when everything before it is
there, and how long everything after it takes, stand in `fxpart.cost.incremental`. So a sweep over
all windows takes time in proportion to the model. Kernighan, Lin: An efficient heuristic procedure
for partitioning graphs. Bell System Technical Journal 49(2), 1970.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.incremental import estimate
from fxpart.cost.kernels import peak_on_device, schedule
from fxpart.placement.search.local_search import SearchTables, home_of, refreshed
from fxpart.placement.search.units import Units
from fxpart.support.compiled import compiled, inlined

__all__ = ["WINDOW", "improve_windows"]

WINDOW = 128
"""Operators looked at together: about a layer of a transformer, and what is around it."""
DEPTH = 16
"""Longest chain of moves."""
PATIENCE = 3
"""Moves without a new best after which a chain is given up."""
SMALL = 4 * WINDOW
"""Operators up to which a chain may move any unit: others make room for what is critical."""
ROUNDS = 4
"""Most chains kept in one window before the next is looked at."""
TRANSFER_WEIGHT = 1e-3
"""A second of transfer that delays nothing counts as this many: of equal plans, the quieter."""

SPREAD_WEIGHT = 1e-3
"""Weight of how unevenly devices are used: of several equally late, one moved alone gains nothing,
yet it is on the way."""


class _Window(NamedTuple):
    """Units that lie between two operators, and the room of the devices."""

    unit: IntArray
    """Units that may move."""
    first: int
    last: int
    room: IntArray
    """Bytes that each device could still take, by a rough count, shape (D,)."""
    bytes_of_unit: IntArray
    """By the same count, shape (U,)."""


@compiled
def _cost(s: SearchTables, device_of: IntArray, window: _Window) -> float:
    """Return the latency, and a little of what may lower it later, in seconds."""
    longest, sent_s, square = estimate(s.costs, device_of, s.progress, window.first, window.last)
    spread = square / longest if longest > 0.0 else 0.0
    return longest + TRANSFER_WEIGHT * sent_s + SPREAD_WEIGHT * spread


@inlined
def _candidates(s: SearchTables, device_of: IntArray, window: _Window) -> IntArray:
    """Return the devices in the window, and of the others of each kind the one with most room.

    What is idle during the window, and alike, is alike for all that the window can tell.
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
    """Move the unit; return where it was. Room is kept up to date."""
    start, ops = units
    was = device_of[ops[start[unit]]]
    device_of[ops[start[unit] : start[unit + 1]]] = device
    window.room[was] += window.bytes_of_unit[unit]
    window.room[device] -= window.bytes_of_unit[unit]
    return int(was)


@inlined
def _best_step(  # noqa: PLR0917 - compiled: all by position
    s: SearchTables,
    units: Units,
    window: _Window,
    device_of: IntArray,
    free: IntArray,
    least: float,
) -> tuple[float, int, int]:
    """Return (cost, position in the window, device) of the best move of a unit that is free.

    While one device has too little room, only what lies there moves. A move that leaves too little
    is made only if its cost is below `least`: something else may then make room.
    """
    start, ops = units
    full = int(np.argmin(window.room))
    full = full if window.room[full] < 0 else -1
    best, best_at, best_device = np.inf, -1, -1
    devices = _candidates(s, device_of, window)
    for at in range(window.unit.shape[0]):
        unit = window.unit[at]
        home = device_of[ops[start[unit]]]
        if not free[at] or (full >= 0 and home != full):
            continue
        for device in devices:
            if device == home:
                continue
            device_of[ops[start[unit] : start[unit + 1]]] = device
            cost = _cost(s, device_of, window)
            if cost < best and (cost < least or window.room[device] >= window.bytes_of_unit[unit]):
                best, best_at, best_device = cost, at, device
        device_of[ops[start[unit] : start[unit + 1]]] = home
    return best, best_at, best_device


@inlined
def _worth_moving(s: SearchTables, units: Units, window: _Window, n: int) -> IntArray:
    """Return 1 for the units that a chain may move: those on a longest path, in large models."""
    start, ops = units
    free = np.ones(window.unit.shape[0], dtype=np.int64)
    if n <= SMALL:
        return free
    for at in range(free.shape[0]):
        unit = window.unit[at]
        free[at] = s.progress.critical[ops[start[unit] : start[unit + 1]]].any()
    return free


@inlined
def _chain(s: SearchTables, units: Units, window: _Window, device_of: IntArray) -> bool:
    """Make a chain of moves and keep its best prefix; return whether that is any better."""
    begin = _cost(s, device_of, window)
    best, kept = begin * (1.0 - 1e-9), 0
    free = _worth_moving(s, units, window, device_of.shape[0])
    moved = np.zeros((DEPTH, 2), dtype=np.int64)
    made = 0
    while made < min(DEPTH, kept + PATIENCE):
        cost, at, device = _best_step(s, units, window, device_of, free, best)
        if at < 0 and made > kept and window.room.min() < 0:
            # Nothing makes room for the last move: it was none.
            made -= 1
            _move(units, window, device_of, moved[made, 0], moved[made, 1])
            continue
        if at < 0:
            break
        free[at] = 0
        moved[made, 0] = window.unit[at]
        moved[made, 1] = _move(units, window, device_of, window.unit[at], device)
        made += 1
        if cost < best and window.room.min() >= 0:
            best, kept = cost, made
    for back in range(made - 1, kept - 1, -1):
        _move(units, window, device_of, moved[back, 0], moved[back, 1])
    return kept > 0


@inlined
def _units_inside(units: Units, device_of: IntArray, first: int, last: int) -> IntArray:
    """Return the units on one device whose operators all lie from `first` to `last`, in order."""
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
    found = 0
    for unit in range(low, count):
        if ops[start[unit]] > last:
            break
        if ops[start[unit + 1] - 1] <= last and home_of(units, unit, device_of) >= 0:
            inside[found] = unit
            found += 1
    return inside[:found]


@compiled
def _measure_room(s: SearchTables, device_of: IntArray, devices: IntArray, room: IntArray) -> bool:
    """Set the bytes that each of `devices` has free; return whether none has too few."""
    for device in devices:
        room[device] = s.sizes[device]
        if s.used[device]:
            room[device] -= peak_on_device(s.memory, device_of, device, s.change)
    return bool(room.min() >= 0)


@inlined
def _bytes_of_units(s: SearchTables, units: Units) -> IntArray:
    """Return the weights of each unit and what it makes, in bytes."""
    start, ops = units
    m = s.memory
    unit_bytes = np.zeros(start.shape[0] - 1, dtype=np.int64)
    for unit in range(unit_bytes.shape[0]):
        for op in ops[start[unit] : start[unit + 1]]:
            for i in range(m.use_start[op], m.use_start[op + 1]):
                unit_bytes[unit] += m.weight_bytes[m.uses[i]]
            for value in range(m.made_start[op], m.made_start[op + 1]):
                unit_bytes[unit] += m.alloc_bytes[value]
    return unit_bytes


@inlined
def _improve_window(
    s: SearchTables, units: Units, device_of: IntArray, window: _Window, latency: float
) -> float:
    """Make chains of moves in the window; keep them if the whole model is faster and fits."""
    first, last = window.first, window.last
    was = device_of[first : last + 1].copy()
    for _ in range(ROUNDS):
        if not _chain(s, units, window, device_of):
            break
    if (device_of[first : last + 1] == was).all():
        return latency
    touched = np.zeros(s.sizes.shape[0], dtype=np.bool_)
    for op in range(first, last + 1):
        touched[was[op - first]] = touched[device_of[op]] = True
    devices = np.flatnonzero(touched)
    latency_s, _ = schedule(s.costs, device_of, s.log)
    if latency_s < latency * (1.0 - s.min_gain):
        latency_s = refreshed(s, device_of)
        if _measure_room(s, device_of, devices, window.room):
            return latency_s
    for op in range(first, last + 1):
        device_of[op] = was[op - first]
    refreshed(s, device_of)
    _measure_room(s, device_of, devices, window.room)
    return latency


@compiled
def improve_windows(s: SearchTables, device_of: IntArray, units: Units, max_passes: int) -> float:
    """Change `device_of` window by window while the latency falls; return the latency.

    `device_of` fits at the start and at the end. A unit that is divided over devices stays. Windows
    overlap by half; one is looked at again only when it, or one beside it, has changed.
    """
    latency = refreshed(s, device_of)
    n, bytes_of_unit = device_of.shape[0], _bytes_of_units(s, units)
    room = np.empty(s.sizes.shape[0], dtype=np.int64)
    _measure_room(s, device_of, np.arange(room.shape[0]), room)
    stale = np.ones(n // (WINDOW // 2) + 3, dtype=np.bool_)
    for _ in range(max_passes):
        for at in range((n + WINDOW // 2 - 1) // (WINDOW // 2)):
            if not stale[at + 1]:
                continue
            stale[at + 1] = False
            first = at * (WINDOW // 2)
            last = min(first + WINDOW, n) - 1
            inside = _units_inside(units, device_of, first, last)
            window = _Window(inside, first, last, room, bytes_of_unit)
            improved = _improve_window(s, units, device_of, window, latency)
            if improved < latency:
                latency = improved
                stale[at : at + 3] = True
        if not stale[1:-1].any():
            break
    return latency
