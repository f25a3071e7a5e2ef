"""Derive partitions from a device for each operator, as few as we can find.

A partition is a run of one device's operators that needs no result of another device midway, so it
can execute as one module: receive all inputs, run, send all outputs. Executed by number, partitions
run every device's operators in graph order, as the simulated schedule assumes. With replicas, this
holds for every input.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph, csr
from fxpart.errors import CycleError, SpecError
from fxpart.support.compiled import compiled

__all__ = [
    "Edges",
    "Homes",
    "crossings",
    "meetings",
    "partition_by_device",
    "partition_by_homes",
    "partition_order",
    "turns",
]


# The order in which partitions run. A partition waits for the partitions it reads from; of two on
# one device for the same input, the one whose operators come first in the graph runs first, since
# devices run operators in graph order.

Edges = list[tuple[int, int]]
"""Sorted distinct pairs (a, b) of partitions, where b waits for a."""
Homes = tuple[tuple[int, ...], ...]
"""Devices that take inputs round-robin, for each partition or each kind of operator."""


def crossings(graph: OpGraph, part_of: IntArray) -> Edges:
    """Return the pairs (a, b) of partitions where b reads a value that a produces."""
    maker = graph.value_producer[graph.reads]
    is_made = maker >= 0
    return _distinct(part_of[maker[is_made]], part_of[graph.readers[is_made]])


def meetings(homes: Homes) -> Edges:
    """Return the pairs ``a < b`` of `homes` that share a device for the same input."""
    on_device: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, devices in enumerate(homes):
        for position, device in enumerate(devices):
            on_device[device].append((number, position))
    # Input i is at place i modulo the length: two places meet if some i is at both.
    edges = {
        (a, b)
        for entries in on_device.values()
        for index, (b, entry) in enumerate(entries)
        for a, other in entries[:index]
        if (entry - other) % gcd(len(homes[a]), len(homes[b])) == 0
    }
    return sorted(edges)


def turns(part_of: IntArray, home_of: IntArray, meets: Edges) -> Edges:
    """Return the pairs (a, b) of partitions where b comes next on a device of a.

    Args:
        part_of: partition of each operator. Length n.
        home_of: index of each operator's homes. Length n.
        meets: the `meetings` of the homes.

    """
    by_home = np.argsort(home_of, kind="stable")
    count = 1 + max([int(home_of.max()), *(b for _, b in meets)])
    starts = np.searchsorted(home_of[by_home], np.arange(count + 1))
    ops = [by_home[a:b] for a, b in itertools.pairwise(starts)]
    together = [np.sort(np.concatenate([ops[a], ops[b]])) for a, b in meets]
    rows = [part_of[ops_of_device] for ops_of_device in (*ops, *together)]
    return _distinct(
        np.concatenate([row[:-1] for row in rows]), np.concatenate([row[1:] for row in rows])
    )


def _distinct(before: IntArray, after: IntArray) -> Edges:
    pairs = np.stack([before, after], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return [(int(a), int(b)) for a, b in pairs]


def partition_order(count: int, edges: Edges, first_op: list[int]) -> list[int]:
    """Return a topological order of partitions 0..count-1.

    Ties go to the partition whose first operator is earliest in the graph. O(partitions log
    partitions + edges).

    Raises:
        CycleError: if partitions wait for each other; the message shows one cycle.

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
        circle = [str(part) for part in _circle(edges, waits)]
        shown = circle if len(circle) <= 9 else [*circle[:8], "...", circle[-1]]
        raise CycleError(
            f"partitions wait for each other's results: {' reads from '.join(shown)}; move the"
            " operators between them into one partition"
        )
    return order


def _circle(edges: Edges, waits: list[int]) -> list[int]:
    """Return a cycle of partitions, each waiting for the next; the first is repeated at the end.

    Every partition left waits for another one left, so following those edges enters a cycle.
    """
    source: dict[int, int] = {}
    for before, after in edges:
        if waits[before] > 0 and waits[after] > 0:
            source.setdefault(after, before)
    part_now = next(part for part, pending in enumerate(waits) if pending > 0)
    path: list[int] = []
    position: dict[int, int] = {}
    while part_now not in position:
        position[part_now] = len(path)
        path.append(part_now)
        part_now = source[part_now]
    return [*path[position[part_now] :], part_now]


@compiled
def _levels(  # noqa: PLR0917 - compiled code takes no keywords
    read_start: IntArray,
    reads: IntArray,
    producer: IntArray,
    home_of: IntArray,
    meet_start: IntArray,
    meets: IntArray,
) -> IntArray:
    """Return the level of each operator: the fewest switches between homes before it can run.

    Levels do not decrease along a home's operators. They increase strictly along every transfer,
    and from an operator to a later one of another home with which it shares a device.
    """
    current = np.full(meet_start.shape[0] - 1, -1, dtype=np.int64)
    level = np.zeros(home_of.shape[0], dtype=np.int64)
    for op in range(home_of.shape[0]):
        home = home_of[op]
        lowest = max(current[home], 0)
        for i in range(meet_start[home], meet_start[home + 1]):
            lowest = max(lowest, current[meets[i]] + 1)
        for i in range(read_start[op], read_start[op + 1]):
            maker = producer[reads[i]]
            if maker >= 0:
                lowest = max(lowest, level[maker] + (1 if home_of[maker] != home else 0))
        level[op] = lowest
        current[home] = lowest
    return level


@dataclass(slots=True)
class _Run:
    """Consecutive operators of one home."""

    home: int
    first_op: int
    low: int
    high: int
    """Lowest and highest level of its operators."""
    after: set[int] = field(default_factory=set)
    """Runs that read from it, or come next on one of its devices."""


def _runs(
    graph: OpGraph, home_of: IntArray, count: int, meets: Edges
) -> tuple[IntArray, list[_Run]]:
    """Return the run of each operator, and the runs (one per home and level) with their edges."""
    met: list[list[int]] = [[] for _ in range(count)]
    for a, b in meets:
        met[a].append(b)
        met[b].append(a)
    level = _levels(graph.read_start, graph.reads, graph.value_producer, home_of, *csr(met))
    key = level * count + home_of
    keys, first, run_of = np.unique(key, return_index=True, return_inverse=True)
    run_of = run_of.astype(np.int64)
    runs = [
        _Run(int(k % count), int(op), int(k // count), int(k // count))
        for k, op in zip(keys, first, strict=True)
    ]
    for before, after in _edges(graph, run_of, home_of, meets):
        runs[before].after.add(after)
    return run_of, runs


def _edges(graph: OpGraph, part_of: IntArray, home_of: IntArray, meets: Edges) -> Edges:
    return sorted({*crossings(graph, part_of), *turns(part_of, home_of, meets)})


def _leads_around(runs: list[_Run], merged: list[int], source: int, target: int) -> bool:
    """Return whether a path from `source` to `target` passes through a third run."""
    limit = runs[target].high
    stack = [x for x in _after(runs, merged, source) if x != target]
    visited = set(stack)
    while stack:
        run = stack.pop()
        for nxt in _after(runs, merged, run):
            if nxt == target:
                return True
            # Levels grow along every path, so a run that begins too high cannot lead back.
            if nxt not in visited and nxt != source and runs[nxt].low < limit:
                visited.add(nxt)
                stack.append(nxt)
    return False


def _after(runs: list[_Run], merged: list[int], run: int) -> set[int]:
    """Return the successors of `run` under the merges so far."""
    later = set()
    for index in runs[run].after:
        while merged[index] != index:
            index = merged[index]  # noqa: PLW2901 - following a short chain of merges
        if index != run:
            later.add(index)
    runs[run].after = later
    return later


def _merge(runs: list[_Run]) -> list[int]:
    """Merge consecutive runs of each home unless that closes a cycle; return the new owners."""
    merged = list(range(len(runs)))
    last_of_home: dict[int, int] = {}
    for index, run in enumerate(runs):
        last = last_of_home.get(run.home)
        if last is not None and not _leads_around(runs, merged, last, index):
            runs[last].after |= run.after
            runs[last].high = run.high
            merged[index] = last
        else:
            last_of_home[run.home] = index
    return merged


def partition_by_device(graph: OpGraph, device_of: IntArray) -> Assignment:
    """Return the assignment that puts each operator on its device, in few partitions.

    Args:
        graph: the placed graph, with n operators.
        device_of: logical id of the device of each operator, from 0. Length n.

    Raises:
        SpecError: if there are more or fewer than n ids, or one is negative.

    """
    device_of = np.asarray(device_of)
    if device_of.dtype.kind not in "iu":
        raise SpecError(f"devices are numbered by integers, got {device_of.dtype}")
    if device_of.shape != (graph.n_ops,) or device_of.min(initial=0) < 0:
        raise SpecError(
            f"a placement has one device for each of {graph.n_ops} operators, numbered from 0, got"
            f" {device_of.size}, the lowest is {device_of.min(initial=0)}"
        )
    homes = tuple((device,) for device in range(int(device_of.max()) + 1))
    return partition_by_homes(graph, device_of, homes)


def partition_by_homes(
    graph: OpGraph, home_of: IntArray, homes: Homes, *, in_turn: bool = True
) -> Assignment:
    """Return the assignment that puts each operator on its devices, in few partitions.

    Args:
        graph: the placed graph, with n operators.
        home_of: index into `homes` of each operator. Length n.
        homes: logical ids of devices in round-robin order.
        in_turn: whether homes that share a device take turns there in graph order; otherwise their
            partitions are ordered only by what they read.

    """
    meets = meetings(homes) if in_turn else []
    run_of, runs = _runs(graph, home_of, len(homes), meets)
    merged = np.array(_merge(runs), dtype=np.int64)
    while not np.array_equal(merged, merged[merged]):
        merged = merged[merged]
    owners, part_of = np.unique(merged[run_of], return_inverse=True)
    part_of = part_of.astype(np.int64)
    first_op = [runs[int(owner)].first_op for owner in owners]
    order = partition_order(len(owners), _edges(graph, part_of, home_of, meets), first_op)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    return Assignment(number[part_of], tuple(homes[runs[int(owners[p])].home] for p in order))
