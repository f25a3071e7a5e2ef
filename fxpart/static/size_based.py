"""Fill one device after the other in graph order: the greedy mode of torch's partitioner.

The bookkeeping is that of ``Partitioner.size_based_partition`` in
``torch.fx.experimental.accelerator_partitioner``, so that the partitions and devices are the same
wherever torch finds an answer. What costs torch a new set of nodes and a new sum for each operator
is here one pass over the reads: an operand is free when it lies in the open partition already.

Where torch finds none because of the order in which devices are taken, smallest first and largest
first are tried before giving up.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.arrays import BoolArray, GraphArrays, arrays_of
from fxpart.static.device_map import map_partitions
from fxpart.static.filling import added_bytes, nothing_filled, put
from fxpart.static.graph import StaticGraph, StaticPlan, StaticProblem
from fxpart.static.refusals import no_plan, too_large_alone

__all__ = ["alone_bytes", "size_based"]


@compiled
def _first_free(taken: BoolArray, memory: IntArray, needed_bytes: int) -> int:
    """Return the first device that is not taken and holds so much, or the number of devices."""
    device = 0
    while device < memory.shape[0] and (taken[device] or memory[device] < needed_bytes):
        device += 1
    return device


@compiled
def _fill(graph: GraphArrays, alone: IntArray, memory: IntArray) -> tuple[int, IntArray, IntArray]:
    """Return the number of partitions, each operator's partition, and each partition's device.

    Devices are taken in the order of `memory`. A device of -1 means that no free one was large
    enough: from there on each operator is a partition of its own.
    """
    n, devices = alone.shape[0], memory.shape[0]
    filling, device_of = nothing_filled(graph), np.full(n, -1, dtype=np.int64)
    taken = np.zeros(devices, dtype=np.bool_)
    current, count, left = -1, 0, np.int64(0)
    for op in range(n):
        added = added_bytes(graph, filling, alone, op, current)
        if current < 0 or added > left:
            device = _first_free(taken, memory, alone[op])
            if device == devices:
                filling.part[op:] = np.arange(count, count + n - op)
                count += n - op
                break
            taken[device] = True
            current, left, added = count, memory[device], alone[op]
            device_of[count] = device
            count += 1
        put(graph, filling, op, current)
        left -= added
    return count, filling.part, device_of[:count]


def _row_sums(items: IntArray, start: IntArray) -> IntArray:
    """Return the sum of each row of a CSR array."""
    running = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items, out=running[1:])
    return running[start[1:]] - running[start[:-1]]


def alone_bytes(graph: StaticGraph) -> IntArray:
    """Return the bytes that each operator needs on a device of its own. Shape (n,).

    Its weights and output, and everything that it reads.
    """
    read = _row_sums(graph.output_bytes[graph.reads], graph.read_start)
    return (
        graph.total_bytes + read + _row_sums(graph.source_bytes[graph.sources], graph.source_start)
    )


def _attempt(problem: StaticProblem, alone: IntArray, order: IntArray) -> StaticPlan | None:
    """Return the plan that takes devices in this order, or None when there is none."""
    memory = problem.memory_bytes[order]
    count, part, device_of = _fill(arrays_of(problem.graph), alone, memory)
    homes: IntArray | None = np.where(device_of < 0, -1, order[device_of])
    if (device_of < 0).any():
        homes = map_partitions(problem, part, count, [int(d) for d in np.asarray(homes)])
    if homes is None:
        return None
    return StaticPlan(part, tuple((int(device),) for device in homes))


def size_based(problem: StaticProblem) -> StaticPlan:
    """Return the plan that fills the devices one after the other, in graph order.

    An operator joins the open partition while it fits the memory left there; else the next device
    that holds it opens a partition. When no device is left, each further operator is a partition of
    its own, and goes where `map_partitions` finds room. O(reads), apart from that last step.

    Raises:
        InfeasibleError: when an operator is larger than every device, or no order of devices leads
            to a plan in which every partition has a device.

    """
    memory, alone = problem.memory_bytes, alone_bytes(problem.graph)
    refused = too_large_alone(problem, alone)
    if refused is not None:
        raise refused
    ascending = np.argsort(memory, kind="stable").astype(np.int64)
    for order in (np.arange(len(memory), dtype=np.int64), ascending, ascending[::-1].copy()):
        plan = _attempt(problem, alone, order)
        if plan is not None:
            return plan
    raise no_plan(problem, "give more memory, or mode kl_based")
