"""From a device for each operator to partitions: the fewest runs of operators we can find.

A partition is a run of one device's operators during which nothing has to come back from another
device, so that it can be carried out as one module: get all inputs, run, hand on all outputs.
Carried out by number, partitions run every device's operators in graph order, which is the order
that the simulated schedule assumes.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from fxpart.assignment import Assignment
from fxpart.compiled import compiled
from fxpart.errors import CycleError
from fxpart.graph import IntArray, OpGraph

__all__ = ["partition_by_device", "partition_order"]


@compiled
def _levels(
    read_start: IntArray, reads: IntArray, producer: IntArray, device_of: IntArray, devices: int
) -> IntArray:
    """Return for each operator how often data must have changed device before it can run.

    Non-decreasing along every device's operators; strictly increasing along every transfer.
    """
    current = np.zeros(devices, dtype=np.int64)
    level = np.zeros(device_of.shape[0], dtype=np.int64)
    for op in range(device_of.shape[0]):
        here = device_of[op]
        least = current[here]
        for i in range(read_start[op], read_start[op + 1]):
            maker = producer[reads[i]]
            if maker >= 0:
                least = max(least, level[maker] + (1 if device_of[maker] != here else 0))
        level[op] = least
        current[here] = least
    return level


@dataclass(slots=True)
class _Run:
    """Operators of one device, next to each other in its order."""

    device: int
    first_op: int
    low: int
    high: int
    """Least and greatest level of its operators."""
    after: set[int] = field(default_factory=set)
    """Runs that read from it, or come next on its device."""


def _runs(graph: OpGraph, device_of: IntArray, devices: int) -> tuple[IntArray, list[_Run]]:
    """Return the run of each operator, and the runs with their edges, one for each level."""
    level = _levels(graph.read_start, graph.reads, graph.value_producer, device_of, devices)
    key = level * devices + device_of
    keys, first, run_of = np.unique(key, return_index=True, return_inverse=True)
    run_of = run_of.astype(np.int64)
    runs = [
        _Run(int(k % devices), int(op), int(k // devices), int(k // devices))
        for k, op in zip(keys, first, strict=True)
    ]
    for before, after in _crossings(graph, run_of):
        runs[before].after.add(after)
    last: dict[int, int] = {}
    for index, run in enumerate(runs):
        if run.device in last:
            runs[last[run.device]].after.add(index)
        last[run.device] = index
    return run_of, runs


def _crossings(graph: OpGraph, part_of: IntArray) -> list[tuple[int, int]]:
    """Return the distinct pairs of parts between which a value passes."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    made = maker >= 0
    pairs = np.stack([part_of[maker[made]], part_of[reader[made]]], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return [(int(a), int(b)) for a, b in pairs]


def _leads_around(runs: list[_Run], merged: list[int], source: int, target: int) -> bool:
    """Return whether a path from `source` to `target` passes through a third run."""
    limit = runs[target].high
    stack = [x for x in _after(runs, merged, source) if x != target]
    seen = set(stack)
    while stack:
        here = stack.pop()
        for nxt in _after(runs, merged, here):
            if nxt == target:
                return True
            # Levels grow along every path, so a run that begins too high cannot lead back.
            if nxt not in seen and nxt != source and runs[nxt].low < limit:
                seen.add(nxt)
                stack.append(nxt)
    return False


def _after(runs: list[_Run], merged: list[int], run: int) -> set[int]:
    """Return the runs after `run`, as they are merged by now."""
    found = set()
    for index in runs[run].after:
        while merged[index] != index:
            index = merged[index]  # noqa: PLW2901 - following a short chain of merges
        if index != run:
            found.add(index)
    runs[run].after = found
    return found


def _merge(runs: list[_Run]) -> list[int]:
    """Join neighbouring runs of each device where no circle comes of it; return the new owners."""
    merged = list(range(len(runs)))
    open_run: dict[int, int] = {}
    for index, run in enumerate(runs):
        held = open_run.get(run.device)
        if held is not None and not _leads_around(runs, merged, held, index):
            runs[held].after |= run.after
            runs[held].high = run.high
            merged[index] = held
        else:
            open_run[run.device] = index
    return merged


def partition_order(count: int, edges: list[tuple[int, int]], first_op: list[int]) -> list[int]:
    """Return parts 0..count-1 in an order in which none comes before one that it reads from.

    Among those that could come next, the one whose first operator is earliest in the graph.

    Raises:
        CycleError: when parts wait for each other; the message names them.

    """
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for a, b in edges:
        after[a].append(b)
        waits[b] += 1
    ready = [(first_op[p], p) for p in range(count) if waits[p] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, part = heapq.heappop(ready)
        order.append(part)
        for nxt in after[part]:
            waits[nxt] -= 1
            if waits[nxt] == 0:
                heapq.heappush(ready, (first_op[nxt], nxt))
    if len(order) < count:
        stuck = [str(p) for p in range(count) if waits[p] > 0]
        raise CycleError(
            f"partitions {', '.join(stuck[:8])} wait for each other's results;"
            " move the operators between them into one partition"
        )
    return order


def partition_by_device(graph: OpGraph, device_of: IntArray) -> Assignment:
    """Return the assignment that puts each operator on its device, in few partitions."""
    devices = int(device_of.max()) + 1
    run_of, runs = _runs(graph, device_of, devices)
    merged = np.array(_merge(runs), dtype=np.int64)
    while not np.array_equal(merged, merged[merged]):
        merged = merged[merged]
    owners, part_of = np.unique(merged[run_of], return_inverse=True)
    part_of = part_of.astype(np.int64)
    edges = _crossings(graph, part_of)
    held: dict[int, int] = {}
    for part, owner in enumerate(owners):
        device = runs[int(owner)].device
        if device in held:
            edges.append((held[device], part))
        held[device] = part
    first_op = [runs[int(owner)].first_op for owner in owners]
    order = partition_order(len(owners), sorted(set(edges)), first_op)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    homes = tuple((runs[int(owners[part])].device,) for part in order)
    return Assignment(number[part_of], homes)
