"""`contiguous`: cut an operator order into one run per device, with the least delay.

Dynamic programming over positions and sets of used devices. A boundary costs the largest increase
of the longest path caused by a single transfer across it. For a chain this gives the best
contiguous placement; otherwise it is a heuristic, and the placement is evaluated by its paths.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.tables import Tables

__all__ = ["Steps", "contiguous", "delays", "steps_over"]

_MOST_STATES = 64
"""Maximal number of distinct sets of used devices; time grows with it. Reached by 63 devices of one
size, or by six of different sizes."""


class Steps(NamedTuple):
    """Transitions between sets of used devices (states); state 0 is the empty set."""

    before: IntArray
    """State before each step. Steps into a state precede steps out of it."""
    after: IntArray
    """State after each step."""
    device: IntArray
    """Device added by each step."""
    states: int


def steps_over(memory: IntArray) -> Steps:
    """Return the steps over devices; devices with equal memory are interchangeable.

    If there would be more than 64 states, devices are used in order of decreasing memory, each at
    most once.
    """
    sizes, kind_of = np.unique(memory, return_inverse=True)
    kinds = [np.flatnonzero(kind_of == kind) for kind in range(len(sizes))]
    counts = [len(kind) for kind in kinds]
    rows: list[tuple[int, int, int]] = []
    if np.prod([count + 1 for count in counts], dtype=float) > _MOST_STATES:
        order = np.argsort(-memory, kind="stable")
        for position, device in enumerate(order):
            rows += [(before, position + 1, int(device)) for before in range(position + 1)]
        return _steps(rows, len(memory) + 1)
    states = {
        use_counts: i for i, use_counts in enumerate(product(*(range(c + 1) for c in counts)))
    }
    for use_counts, number in states.items():
        for kind, count in enumerate(use_counts):
            if count:
                fewer = (*use_counts[:kind], count - 1, *use_counts[kind + 1 :])
                rows.append((states[fewer], number, int(kinds[kind][count - 1])))
    return _steps(rows, len(states))


def _steps(rows: list[tuple[int, int, int]], states: int) -> Steps:
    """Return rows of (before, after, device) as arrays."""
    before, after, device = np.array(rows, dtype=np.int64).T.copy()
    return Steps(before, after, device, states)


@compiled
def delays(tables: Tables, order: IntArray, alone_s: FloatArray) -> FloatArray:
    """Return the cost of a boundary before each position, that of its worst read. Shape (n,).

    `alone_s` is the increase of the longest path by each read alone. O(n log n + reads).
    """
    n = order.shape[0]
    position_of = np.empty(n, dtype=np.int64)
    position_of[order] = np.arange(n)
    levels = 1
    while 1 << levels < n:
        levels += 1
    # A read spans an interval, covered by two overlapping ones of 2^level positions.
    worst_s = np.zeros((levels + 1, n))
    for op in range(n):
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            first = min(position_of[op], position_of[tables.reads[i]]) + 1
            last, level = max(position_of[op], position_of[tables.reads[i]]), 0
            while 2 << level <= last - first + 1:
                level += 1
            second = last - (1 << level) + 1
            worst_s[level, first] = max(worst_s[level, first], alone_s[i])
            worst_s[level, second] = max(worst_s[level, second], alone_s[i])
    for level in range(levels, 0, -1):
        half = 1 << (level - 1)
        for position in range(n):
            value = worst_s[level, position]
            if value > 0:
                worst_s[level - 1, position] = max(worst_s[level - 1, position], value)
                worst_s[level - 1, position + half] = max(
                    worst_s[level - 1, position + half], value
                )
    boundary: FloatArray = worst_s[0].copy()
    return boundary


@compiled
def _added_bytes(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, position_of: IntArray, source_readers: IntArray, op: int, low: int, high: int
) -> int:
    """Return the bytes that `op` adds to the operators at positions low to high - 1."""
    added = tables.total[op]
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        if not low <= position_of[tables.reads[i]] < high:
            added += tables.output[tables.reads[i]]
    for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
        if low <= position_of[tables.readers[i]] < high:
            added -= tables.output[op]
    for i in range(tables.source_start[op], tables.source_start[op + 1]):
        if source_readers[tables.sources[i]] == 0:
            added += tables.source_bytes[tables.sources[i]]
    return int(added)


@inlined
def _earliest(tables: Tables, order: IntArray, available: int) -> IntArray:
    """Return the start of the longest run that fits and ends at each position. Shape (n + 1,)."""
    n = order.shape[0]
    position_of, earliest = np.empty(n, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    position_of[order] = np.arange(n)
    source_readers = np.zeros(tables.source_bytes.shape[0], dtype=np.int64)
    low, used_bytes = 0, 0
    for high in range(n):
        op = order[high]
        used_bytes += _added_bytes(tables, position_of, source_readers, op, low, high)
        for i in range(tables.source_start[op], tables.source_start[op + 1]):
            source_readers[tables.sources[i]] += 1
        while used_bytes > available:
            op = order[low]
            for i in range(tables.source_start[op], tables.source_start[op + 1]):
                source_readers[tables.sources[i]] -= 1
            low += 1
            used_bytes -= _added_bytes(tables, position_of, source_readers, op, low, high + 1)
        earliest[high + 1] = low
    return earliest


@inlined
def _step(
    least_cost: FloatArray,
    boundary: FloatArray,
    earliest: IntArray,
    new_cost: FloatArray,
    begin: IntArray,
) -> None:
    """Extend `least_cost` up to each position by one run into `new_cost` and `begin`.

    A queue of rising costs maintains the minimum over the window of possible starts.
    """
    n = boundary.shape[0]
    queue, first, last = np.empty(n + 1, dtype=np.int64), 0, 0
    for end in range(1, n + 1):
        new = end - 1
        cost = least_cost[new] + boundary[new]
        while last > first and least_cost[queue[last - 1]] + boundary[queue[last - 1]] > cost:
            last -= 1
        queue[last] = new
        last += 1
        while first < last and queue[first] < earliest[end]:
            first += 1
        if first < last:
            start = queue[first]
            cost = least_cost[start] + boundary[start]
            if cost < new_cost[end]:
                new_cost[end], begin[end] = cost, start


@compiled
def contiguous(
    tables: Tables, order: IntArray, boundary: FloatArray, memory: IntArray, steps: Steps
) -> IntArray:
    """Return the device of each operator, -1 if no runs fit. O(steps n + devices reads)."""
    n, devices = order.shape[0], memory.shape[0]
    earliest = np.empty((devices, n + 1), dtype=np.int64)
    for device in range(devices):
        earliest[device] = earliest[device - 1]
        if device == 0 or memory[device] != memory[device - 1]:
            earliest[device] = _earliest(tables, order, memory[device])
    least_cost = np.full((steps.states, n + 1), np.inf)
    least_cost[0, 0] = 0.0
    begin = np.zeros((steps.states, n + 1), dtype=np.int64)
    opened = np.full((steps.states, n + 1), -1, dtype=np.int64)
    for step in range(steps.before.shape[0]):
        before, after, device = steps.before[step], steps.after[step], steps.device[step]
        previous_cost = least_cost[after].copy()
        _step(least_cost[before], boundary, earliest[device], least_cost[after], begin[after])
        for end in range(n + 1):
            if least_cost[after, end] < previous_cost[end]:
                opened[after, end] = step
    device_of, end = np.full(n, -1, dtype=np.int64), n
    state = int(np.argmin(least_cost[:, n]))
    while end > 0 and opened[state, end] >= 0:
        step = opened[state, end]
        start = begin[state, end]
        for position in range(start, end):
            device_of[order[position]] = steps.device[step]
        state, end = steps.before[step], start
    return device_of
