"""From a device for each operator to partitions: the fewest runs of operators we can find.

A partition is a run of one device's operators during which nothing has to come back from another
device, so that it can be carried out as one module: get all inputs, run, hand on all outputs.
Carried out by number, partitions run every device's operators in graph order, which is the order
that the simulated schedule assumes. With replicas, that holds for every input.
"""

from dataclasses import dataclass, field

import numpy as np

from fxpart.assignment import Assignment
from fxpart.compiled import compiled
from fxpart.graph import IntArray, OpGraph, csr
from fxpart.partition_order import Edges, Homes, crossings, meetings, partition_order, turns

__all__ = ["partition_by_device", "partition_by_homes"]


@compiled
def _levels(  # noqa: PLR0917 - compiled code takes no keywords
    read_start: IntArray,
    reads: IntArray,
    producer: IntArray,
    home_of: IntArray,
    meet_start: IntArray,
    meets: IntArray,
) -> IntArray:
    """Return for each operator how often what runs must have changed before it can run.

    Non-decreasing along the operators of every home; strictly increasing along every transfer, and
    from an operator of one home to a later one of another that it meets on a device.
    """
    current = np.full(meet_start.shape[0] - 1, -1, dtype=np.int64)
    level = np.zeros(home_of.shape[0], dtype=np.int64)
    for op in range(home_of.shape[0]):
        here = home_of[op]
        least = max(current[here], 0)
        for i in range(meet_start[here], meet_start[here + 1]):
            least = max(least, current[meets[i]] + 1)
        for i in range(read_start[op], read_start[op + 1]):
            maker = producer[reads[i]]
            if maker >= 0:
                least = max(least, level[maker] + (1 if home_of[maker] != here else 0))
        level[op] = least
        current[here] = least
    return level


@dataclass(slots=True)
class _Run:
    """Operators of one home, next to each other in its order."""

    home: int
    first_op: int
    low: int
    high: int
    """Least and greatest level of its operators."""
    after: set[int] = field(default_factory=set)
    """Runs that read from it, or come next on a device of it."""


def _runs(
    graph: OpGraph, home_of: IntArray, count: int, meets: Edges
) -> tuple[IntArray, list[_Run]]:
    """Return the run of each operator, and the runs with their edges, one for each level."""
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
    """Join neighbouring runs of each home where no circle comes of it; return the new owners."""
    merged = list(range(len(runs)))
    open_run: dict[int, int] = {}
    for index, run in enumerate(runs):
        held = open_run.get(run.home)
        if held is not None and not _leads_around(runs, merged, held, index):
            runs[held].after |= run.after
            runs[held].high = run.high
            merged[index] = held
        else:
            open_run[run.home] = index
    return merged


def partition_by_device(graph: OpGraph, device_of: IntArray) -> Assignment:
    """Return the assignment that puts each operator on its device, in few partitions."""
    homes = tuple((device,) for device in range(int(device_of.max()) + 1))
    return partition_by_homes(graph, device_of, homes)


def partition_by_homes(graph: OpGraph, home_of: IntArray, homes: Homes) -> Assignment:
    """Return the assignment that puts each operator on its devices, in few partitions.

    Args:
        graph: what is placed, with n operators.
        home_of: number in `homes` of each operator's devices. Length n.
        homes: logical ids of devices, in the order in which they take turns; all different.

    """
    meets = meetings(homes)
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
