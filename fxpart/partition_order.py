"""Which partitions must run before which, and one order that keeps to it.

A partition waits for those that it reads from. And where two are on one device for the same input,
the one whose operators come first in the graph runs first: devices run operators in graph order.
"""

import heapq
import itertools
from collections import defaultdict
from math import gcd

import numpy as np

from fxpart.errors import CycleError
from fxpart.graph import IntArray, OpGraph

__all__ = ["Edges", "Homes", "crossings", "meetings", "partition_order", "turns"]

Edges = list[tuple[int, int]]
"""Distinct pairs of partitions of which the second waits for the first, sorted."""
Homes = tuple[tuple[int, ...], ...]
"""Devices that take inputs in turn, for each partition or each kind of operator."""


def crossings(graph: OpGraph, part_of: IntArray) -> Edges:
    """Return the pairs of partitions of which the second reads a value that the first makes."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    made = maker >= 0
    return _distinct(part_of[maker[made]], part_of[reader[made]])


def meetings(homes: Homes) -> Edges:
    """Return the pairs ``a < b`` of `homes` that have one device for the same input."""
    on_device: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, devices in enumerate(homes):
        for place, device in enumerate(devices):
            on_device[device].append((number, place))
    # Input i is at place i modulo the length: two places meet if that can be one i.
    found = {
        (a, b)
        for entries in on_device.values()
        for index, (b, there) in enumerate(entries)
        for a, here in entries[:index]
        if (there - here) % gcd(len(homes[a]), len(homes[b])) == 0
    }
    return sorted(found)


def turns(part_of: IntArray, home_of: IntArray, meets: Edges) -> Edges:
    """Return the pairs of partitions of which the second comes next on a device of the first.

    Args:
        part_of: partition of each operator. Length n.
        home_of: number of each operator's homes. Length n.
        meets: the `meetings` of the homes.

    """
    by_home = np.argsort(home_of, kind="stable")
    count = 1 + max([int(home_of.max()), *(b for _, b in meets)])
    starts = np.searchsorted(home_of[by_home], np.arange(count + 1))
    ops = [by_home[a:b] for a, b in itertools.pairwise(starts)]
    together = [np.sort(np.concatenate([ops[a], ops[b]])) for a, b in meets]
    rows = [part_of[mine] for mine in (*ops, *together)]
    return _distinct(
        np.concatenate([row[:-1] for row in rows]), np.concatenate([row[1:] for row in rows])
    )


def _distinct(before: IntArray, after: IntArray) -> Edges:
    pairs = np.stack([before, after], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return [(int(a), int(b)) for a, b in pairs]


def partition_order(count: int, edges: Edges, first_op: list[int]) -> list[int]:
    """Return partitions 0..count-1 in an order in which none comes before one that it waits for.

    Among those that could come next, the one whose first operator is earliest in the graph.
    O(partitions log partitions + edges).

    Raises:
        CycleError: when partitions wait for each other; the message names one circle of them.

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
    """Return partitions of which each waits for the next; the first stands at the end again.

    Every partition that still waits waits for another such: following those leads into a circle.
    """
    source: dict[int, int] = {}
    for before, after in edges:
        if waits[before] > 0 and waits[after] > 0:
            source.setdefault(after, before)
    here = next(part for part, left in enumerate(waits) if left > 0)
    path: list[int] = []
    place: dict[int, int] = {}
    while here not in place:
        place[here] = len(path)
        path.append(here)
        here = source[here]
    return [*path[place[here] :], here]
