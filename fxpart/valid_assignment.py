"""Whether an assignment that was made elsewhere can be carried out, and in which order."""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.errors import CycleError, SpecError
from fxpart.graph import OpGraph
from fxpart.partition_order import crossings, meetings, partition_order, turns
from fxpart.partitions import partition_by_homes

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
    """Return the assignment so that its partitions can be carried out by number.

    None is before one that it reads from, and for every input they run the operators of each device
    in graph order, which is what `fxpart.cost.evaluate` simulates. As given if that holds already;
    otherwise renumbered. Where partitions of one device interleave, no numbers would do: then the
    operators stay on their devices, replicas included, and are cut into partitions anew.

    Raises:
        CycleError: when partitions wait for each other; it names one circle of them.

    """
    parts, count = assignment.partition_of, assignment.n_partitions
    first_op = np.full(count, graph.n_ops, dtype=np.int64)
    np.minimum.at(first_op, parts, np.arange(graph.n_ops))
    reads = crossings(graph, parts)
    partition_order(count, reads, first_op.tolist())
    homes = tuple(dict.fromkeys(assignment.devices_of_partition))
    number_of = {devices: number for number, devices in enumerate(homes)}
    home_of = np.array([number_of[d] for d in assignment.devices_of_partition])[parts]
    edges = sorted({*reads, *turns(parts, home_of, meetings(homes))})
    if all(before < after for before, after in edges):
        return assignment
    try:
        order = partition_order(count, edges, first_op.tolist())
    except CycleError:
        return partition_by_homes(graph, home_of, homes)
    number = np.empty(count, dtype=np.int64)
    number[order] = np.arange(count)
    return Assignment(number[parts], tuple(assignment.devices_of_partition[p] for p in order))
