"""`size_based`: torch's greedy mode, which fills one device after another in graph order.

The rules are those of ``Partitioner.size_based_partition`` in
``torch.fx.experimental.accelerator_partitioner``, so that partitions and devices are the same
whenever torch finds an answer. Torch builds a new set of nodes and a new sum for each operator;
here one pass over the reads suffices, since an operand in the open partition adds nothing.

If torch fails because of its order of devices, smallest first and largest first are tried too.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.errors import InfeasibleError
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.device_map import map_partitions
from fxpart.torch_compat.accounting.problem import (
    BoolArray,
    GraphArrays,
    StaticGraph,
    StaticPlan,
    StaticProblem,
    arrays_of,
)

__all__ = [
    "Filling",
    "added_bytes",
    "alone_bytes",
    "no_plan",
    "nothing_filled",
    "put",
    "size_based",
    "too_large_alone",
]


class Filling(NamedTuple):
    """Partitions of n operators and m sources, filled in graph order. Changed in place.

    One partition is open at a time. An operator that joins it adds nothing for values that the
    partition already makes or reads, as in both greedy modes of torch (``size_based_partition`` and
    ``sparse_nn_partition``).
    """

    part: IntArray
    """Partition of each operator, -1 if not yet assigned. Length n."""
    last_reader: IntArray
    """The last partition that read each source, -1 if none yet. Length m."""


@compiled
def nothing_filled(graph: GraphArrays) -> Filling:
    """Return a filling in which no operator has a partition."""
    part = np.full(graph.total.shape[0], -1, dtype=np.int64)
    return Filling(part, np.full(graph.source_bytes.shape[0], -1, dtype=np.int64))


@compiled
def added_bytes(
    graph: GraphArrays, filling: Filling, alone: IntArray, op: int, partition: int
) -> int:
    """Return the bytes added by `op` to the open partition.

    `alone` is the `alone_bytes` of each operator. Shape (n,).
    """
    added = alone[op]
    for i in range(graph.read_start[op], graph.read_start[op + 1]):
        if filling.part[graph.reads[i]] == partition:
            added -= graph.output[graph.reads[i]]
    for i in range(graph.source_start[op], graph.source_start[op + 1]):
        if filling.last_reader[graph.sources[i]] == partition:
            added -= graph.source_bytes[graph.sources[i]]
    return int(added)


@compiled
def put(graph: GraphArrays, filling: Filling, op: int, partition: int) -> None:
    """Put `op` into the open partition."""
    filling.part[op] = partition
    for i in range(graph.source_start[op], graph.source_start[op + 1]):
        filling.last_reader[graph.sources[i]] = partition


# Errors raised if no plan exists.


def too_large_alone(problem: StaticProblem, alone: IntArray) -> InfeasibleError | None:
    """Return the error that names an operator too large for every device; None if all fit one.

    `alone` is the `alone_bytes` of each operator. Shape (n,).
    """
    worst, largest = int(alone.argmax()), int(problem.memory_bytes.max())
    needed = int(alone[worst])
    if needed <= largest:
        return None
    return InfeasibleError(
        f"operator {problem.graph.names[worst]} is too large to fit any device: with what it reads"
        f" it needs {needed} bytes, the largest device has {largest};"
        " give a larger device or split the operator",
        needed_bytes=needed,
        available_bytes=largest,
    )


def no_plan(problem: StaticProblem, advice: str) -> InfeasibleError:
    """Return the error with the needed and the available bytes, ending with `advice`."""
    graph, memory = problem.graph, problem.memory_bytes
    needed, present = int(graph.total_bytes.sum() + graph.source_bytes.sum()), int(memory.sum())
    return InfeasibleError(
        f"no valid mapping of partitions to the {len(memory)} devices was found: the graph needs"
        f" {needed} bytes held once, and more where operators on different devices read the same;"
        f" there are {present} in all; {advice}",
        needed_bytes=needed,
        available_bytes=present,
    )


# The mode.


@inlined
def _first_free(in_use: BoolArray, memory: IntArray, needed_bytes: int) -> int:
    """Return the first unused device with enough memory, or the number of devices."""
    device = 0
    while device < memory.shape[0] and (in_use[device] or memory[device] < needed_bytes):
        device += 1
    return device


@compiled
def _fill(graph: GraphArrays, alone: IntArray, memory: IntArray) -> tuple[int, IntArray, IntArray]:
    """Return the number of partitions, each operator's partition, and each partition's device.

    Devices are taken in the order of `memory`. If no unused device is large enough, each further
    operator becomes its own partition, with device -1.
    """
    n, devices = alone.shape[0], memory.shape[0]
    filling, device_of = nothing_filled(graph), np.full(n, -1, dtype=np.int64)
    in_use = np.zeros(devices, dtype=np.bool_)
    current, count, free_bytes = -1, 0, np.int64(0)
    for op in range(n):
        added = added_bytes(graph, filling, alone, op, current)
        if current < 0 or added > free_bytes:
            device = _first_free(in_use, memory, alone[op])
            if device == devices:
                filling.part[op:] = np.arange(count, count + n - op)
                count += n - op
                break
            in_use[device] = True
            current, free_bytes, added = count, memory[device], alone[op]
            device_of[count] = device
            count += 1
        put(graph, filling, op, current)
        free_bytes -= added
    return count, filling.part, device_of[:count]


def _row_sums(items: IntArray, start: IntArray) -> IntArray:
    """Return the sum of each row of a CSR array."""
    running = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items, out=running[1:])
    return running[start[1:]] - running[start[:-1]]


def alone_bytes(graph: StaticGraph) -> IntArray:
    """Return the bytes of each operator alone, including all its reads. Shape (n,)."""
    read = _row_sums(graph.output_bytes[graph.reads], graph.read_start)
    return (
        graph.total_bytes + read + _row_sums(graph.source_bytes[graph.sources], graph.source_start)
    )


def _attempt(problem: StaticProblem, alone: IntArray, order: IntArray) -> StaticPlan | None:
    """Return the plan with devices in this order, or None if infeasible."""
    memory = problem.memory_bytes[order]
    count, part, device_of = _fill(arrays_of(problem.graph), alone, memory)
    homes: IntArray | None = np.where(device_of < 0, -1, order[device_of])
    if (device_of < 0).any():
        homes = map_partitions(problem, part, count, [int(d) for d in np.asarray(homes)])
    if homes is None:
        return None
    return StaticPlan(part, tuple((int(device),) for device in homes))


def size_based(problem: StaticProblem) -> StaticPlan:
    """Return the plan that fills the devices one after another, in graph order.

    An operator joins the open partition if it fits the remaining memory; otherwise the next device
    large enough opens a new one. When devices run out, each further operator becomes its own
    partition, placed by `map_partitions`. O(reads), apart from that last step.

    Raises:
        InfeasibleError: if an operator is larger than every device, or no order of devices gives
            every partition a device.

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
