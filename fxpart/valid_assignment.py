"""Whether an assignment that was made elsewhere can be carried out, and in which order."""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.errors import CycleError, SpecError
from fxpart.graph import OpGraph
from fxpart.partitions import partition_order

__all__ = ["in_valid_order", "refuse_torn_groups"]


def refuse_torn_groups(graph: OpGraph, assignment: Assignment) -> None:
    """Raise `SpecError` where operators that must share a device would not, in any round."""
    homes = assignment.devices_of_partition
    for op in np.flatnonzero(graph.group != np.arange(graph.n_ops)).tolist():
        first = int(graph.group[op])
        here, there = (homes[int(assignment.partition_of[o])] for o in (first, op))
        if here != there:
            raise SpecError(
                f"operators {_named(graph, first)} and {_named(graph, op)} must share a device:"
                " one changes the other's result in place or takes a part of it, or granularity="
                f" keeps their modules whole; they are on {_listed(here)} and {_listed(there)};"
                " put both on one"
            )


def _named(graph: OpGraph, op: int) -> str:
    return graph.names[op] + (f" of {graph.modules[op]}" if graph.modules[op] else "")


def _listed(devices: tuple[int, ...]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


def in_valid_order(graph: OpGraph, assignment: Assignment) -> Assignment:
    """Return the assignment with no partition before one that it reads from.

    As given if that holds already; otherwise renumbered.

    Raises:
        CycleError: when partitions wait for each other; it names one circle of them.

    """
    edges = _edges(graph, assignment)
    if all(before < after for before, after in edges):
        return assignment
    count = assignment.n_partitions
    first_op = np.full(count, graph.n_ops, dtype=np.int64)
    np.minimum.at(first_op, assignment.partition_of, np.arange(graph.n_ops))
    try:
        order = partition_order(count, edges, first_op.tolist())
    except CycleError:
        circle = _circle(count, edges)
        shown = " reads from ".join(map(str, [*circle, circle[0]]))
        raise CycleError(
            f"partitions wait for each other's results: {shown}; move the operators between them"
            " into one partition"
        ) from None
    number = np.empty(count, dtype=np.int64)
    number[order] = np.arange(count)
    homes = tuple(assignment.devices_of_partition[partition] for partition in order)
    return Assignment(number[assignment.partition_of], homes)


def _edges(graph: OpGraph, assignment: Assignment) -> list[tuple[int, int]]:
    """Return the distinct pairs of partitions of which the second reads from the first, sorted."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    made = maker >= 0
    parts = assignment.partition_of
    pairs = np.stack([parts[maker[made]], parts[reader[made]]], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return [(int(a), int(b)) for a, b in pairs]


def _circle(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """Return parts of which each reads from the next and the last from the first; one exists."""
    sources: list[list[int]] = [[] for _ in range(count)]
    for before, after in edges:
        sources[after].append(before)
    # Whatever reads only from what can be carried out can be too; the rest waits for a circle.
    waiting, done = list(range(count)), [False] * count
    while ready := [p for p in waiting if all(done[s] for s in sources[p])]:
        for part in ready:
            done[part] = True
        waiting = [p for p in waiting if not done[p]]
    path = [waiting[0]]
    while (source := next(s for s in sources[path[-1]] if not done[s])) not in path:
        path.append(source)
    return path[path.index(source) :]
