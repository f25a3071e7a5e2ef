"""Torch's `cost_aware` rule for small graphs: repeatedly combine the best pair of partitions.

Candidates are those of torch's partitioner: pairs where one reads from the other, or whose levels
differ by at most one, unless combining them closes a cycle or some partition no longer fits a
device (the one with the least sufficient free memory).
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
"""Most units for which all pairs are simulated: a quarter of a second, and cubic in the units."""

_Edges = npt.NDArray[np.bool_]


class _Tables(NamedTuple):
    """Tables for evaluating candidates, with scratch space."""

    costs: CostTables
    memory: MemoryTables
    sizes: IntArray
    log: ScheduleLog
    change: IntArray


def combine_pairs(problem: Problem) -> IntArray | None:
    """Return the device of each operator after the last combination, or None if nothing fits."""
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
    """Place whole parts in order; return the device of each operator and the latency.

    A part goes to the device with the least sufficient free memory; the latency is infinite if
    there is none.
    """
    device_of = np.full(part_of.shape[0], -1, dtype=np.int64)
    free_bytes = s.sizes.copy()
    for part in range(parts):
        in_part, home = part_of == part, -1
        if not in_part.any():
            continue
        for device in np.argsort(free_bytes, kind="mergesort"):
            device_of[in_part] = device
            peak = peak_on_device(s.memory, device_of, device, s.change)
            if peak <= s.sizes[device]:
                home, free_bytes[device] = device, s.sizes[device] - peak
                break
        if home < 0:
            return device_of, np.inf
    latency, _ = schedule(s.costs, device_of, s.log)
    return device_of, latency


@inlined
def _edges(t: CostTables, part_of: IntArray, parts: int) -> _Edges:
    """Return the edges between parts (row is read by column), shape (P, P)."""
    edges = np.zeros((parts, parts), dtype=np.bool_)
    for op in range(part_of.shape[0]):
        for i in range(t.read_start[op], t.read_start[op + 1]):
            maker = t.producer[t.reads[i]]
            if maker >= 0 and part_of[maker] != part_of[op]:
                edges[part_of[maker], part_of[op]] = True
    return edges


@inlined
def _paths_and_levels(edges: _Edges) -> tuple[_Edges, IntArray]:
    """Return the reachability between parts, and the length of the longest path to each part."""
    parts = edges.shape[0]
    leads, level = edges.copy(), np.zeros(parts, dtype=np.int64)
    for via in range(parts):
        for a in range(parts):
            if leads[a, via]:
                leads[a] |= leads[via]
    for _ in range(parts):
        for a in range(parts):
            for b in range(parts):
                # Cycles (through operators that must share a device) have no levels.
                if edges[a, b] and not leads[b, a]:
                    level[b] = max(level[b], level[a] + 1)
    return leads, level


@inlined
def _may_combine(edges: _Edges, leads: _Edges, level: IntArray, a: int, b: int) -> bool:
    """Return whether two parts are close, and no path between them goes through a third."""
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
    """Combine the best pair until none is at least as fast; return devices and latency."""
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
        # Keep part numbers dense and in order of their first operators.
        part_of = np.where(part_of > second, part_of - 1, part_of)
        parts -= 1
        device_of, latency = _map(s, part_of, parts)
