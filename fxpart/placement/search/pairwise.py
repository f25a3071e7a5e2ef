"""`cost_aware` word for word, for small graphs: combine the best pair of partitions, repeatedly.

Candidates are as in torch's partitioner: pairs one of which reads from the other, or whose levels
differ by at most one, if no circle comes of it and all partitions still find a device (the one with
the least memory left that holds them).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.placement.search.units import atomic_units
from fxpart.support.compiled import compiled, inlined

__all__ = ["EXACT_UNITS", "combine_pairs"]

EXACT_UNITS = 24
"""Most units for which all pairs are simulated: a quarter of a second, and eight times that for
twice as many."""

_Edges = npt.NDArray[np.bool_]


class _Tables(NamedTuple):
    """What a candidate is judged by, and room for it."""

    costs: CostTables
    memory: MemoryTables
    sizes: IntArray
    log: ScheduleLog
    change: IntArray


def combine_pairs(problem: Problem) -> IntArray | None:
    """Return the device of each operator after the last combination, or None if none ever fits."""
    start, ops = atomic_units(problem.graph)
    part_of = np.empty(problem.graph.n_ops, dtype=np.int64)
    part_of[ops] = np.repeat(np.arange(len(start) - 1), np.diff(start))
    tables = _Tables(
        problem.costs,
        problem.memory,
        problem.topology.memory_bytes,
        schedule_log(problem.costs),
        np.empty(problem.graph.n_ops + 1, dtype=np.int64),
    )
    device_of, latency = _combine_all(tables, part_of, len(start) - 1)
    return device_of if latency < np.inf else None


@compiled
def _map(s: _Tables, part_of: IntArray, parts: int) -> tuple[IntArray, float]:
    """Return a device for each operator, whole parts in order, and the latency; infinite if none.

    A part goes to the device with the least memory left that holds it as well.
    """
    device_of = np.full(part_of.shape[0], -1, dtype=np.int64)
    left = s.sizes.copy()
    for part in range(parts):
        in_part, home = part_of == part, -1
        if not in_part.any():
            continue
        for device in np.argsort(left, kind="mergesort"):
            device_of[in_part] = device
            peak = peak_on_device(s.memory, device_of, device, s.change)
            if peak <= s.sizes[device]:
                home, left[device] = device, s.sizes[device] - peak
                break
        if home < 0:
            return device_of, np.inf
    latency, _ = schedule(s.costs, device_of, s.log)
    return device_of, latency


@inlined
def _edges(t: CostTables, part_of: IntArray, parts: int) -> _Edges:
    """Return which part is read by which, shape (P, P)."""
    edges = np.zeros((parts, parts), dtype=np.bool_)
    for op in range(part_of.shape[0]):
        for i in range(t.read_start[op], t.read_start[op + 1]):
            maker = t.producer[t.reads[i]]
            if maker >= 0 and part_of[maker] != part_of[op]:
                edges[part_of[maker], part_of[op]] = True
    return edges


@inlined
def _paths_and_levels(edges: _Edges) -> tuple[_Edges, IntArray]:
    """Return which part leads to which, and the length of the longest way to each part."""
    parts = edges.shape[0]
    leads, level = edges.copy(), np.zeros(parts, dtype=np.int64)
    for via in range(parts):
        for a in range(parts):
            if leads[a, via]:
                leads[a] |= leads[via]
    for _ in range(parts):
        for a in range(parts):
            for b in range(parts):
                # A circle (operators that must share a device, far apart) has no levels.
                if edges[a, b] and not leads[b, a]:
                    level[b] = max(level[b], level[a] + 1)
    return leads, level


@inlined
def _may_combine(edges: _Edges, leads: _Edges, level: IntArray, a: int, b: int) -> bool:
    """Return whether two parts are close, and no way leads from one to the other around them."""
    if abs(level[a] - level[b]) > 1 and not edges[a, b] and not edges[b, a]:
        return False
    for via in range(edges.shape[0]):
        if via not in {a, b} and (
            (leads[a, via] and leads[via, b]) or (leads[b, via] and leads[via, a])
        ):
            return False
    return True


@compiled
def _combine_all(s: _Tables, part_of: IntArray, parts: int) -> tuple[IntArray, float]:
    """Combine the best pair until none is as fast as before; return devices and latency."""
    device_of, latency = _map(s, part_of, parts)
    while True:
        edges = _edges(s.costs, part_of, parts)
        leads, level = _paths_and_levels(edges)
        best, first, second = latency, -1, -1
        for a in range(parts):
            for b in range(a + 1, parts):
                if not _may_combine(edges, leads, level, a, b):
                    continue
                _, candidate = _map(s, np.where(part_of == b, a, part_of), parts)
                if candidate < best or (first < 0 and candidate <= best and candidate < np.inf):
                    best, first, second = candidate, a, b
        if first < 0:
            return device_of, latency
        part_of = np.where(part_of == second, first, part_of)
        # Numbers stay dense and in order of the parts' first operators.
        part_of = np.where(part_of > second, part_of - 1, part_of)
        parts -= 1
        device_of, latency = _map(s, part_of, parts)
