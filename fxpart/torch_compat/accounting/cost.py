"""Latency and memory of a plan, as torch's partitioner counts them.

The latency is that of ``get_latency_of_partitioned_graph`` in
``torch.fx.experimental.partitioner_utils``:

- a partition takes its critical path, since independent operators run concurrently;
- a partition sends each of its readers every output read there and every source that both read,
  once; this takes their bytes over the rate, or nothing between partitions on the same devices;
- the graph takes the longest path over partitions.

Sums run in torch's order, so that results are bitwise equal. Torch walks every path recursively,
2^k of them through k diamonds; here each read is visited once.

The memory of a set of operators is that of ``Partition.recalculate_mem_size`` there:

- the weights and the output of each of its operators;
- the output of each operator outside the set that one inside reads, once for each *reader*;
- each source (placeholder or ``get_attr``) that any of them reads, once.

All outputs count, however short-lived. Since torch counts per reader, the figure is a sum over
operators and reads, and a move changes only the terms of the moved operators.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.errors import CycleError, SpecError
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.problem import (
    GraphArrays,
    StaticGraph,
    StaticPlan,
    StaticProblem,
    arrays_of,
    grouped,
    transposed,
)
from fxpart.torch_compat.accounting.tables import Tables, tables_of

__all__ = ["Quotient", "latency_s", "path_over_partitions_s", "quotient_of", "used_bytes"]


@inlined
def _within_s(
    seconds: FloatArray, read_start: IntArray, reads: IntArray, part: IntArray, count: int
) -> FloatArray:
    """Return the critical path inside each partition."""
    end_s = np.zeros(seconds.shape[0])
    within = np.zeros(count)
    for op in range(seconds.shape[0]):
        for i in range(read_start[op], read_start[op + 1]):
            if part[reads[i]] == part[op]:
                end_s[op] = max(end_s[op], end_s[reads[i]])
        end_s[op] += seconds[op]
        within[part[op]] = max(within[part[op]], end_s[op])
    return within


@inlined
def _sources_read(tables: Tables, part: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the sources that each partition reads as CSR rows, ascending, each once."""
    start = np.zeros(count + 1, dtype=np.int64)
    sources = np.empty(tables.users.shape[0], dtype=np.int64)
    free = np.empty(0, dtype=np.int64)
    for filling in (False, True):
        last = np.full(count, -1, dtype=np.int64)
        for source in range(tables.source_bytes.shape[0]):
            for i in range(tables.user_start[source], tables.user_start[source + 1]):
                reader = part[tables.users[i]]
                if last[reader] == source:
                    continue
                last[reader] = source
                if filling:
                    sources[free[reader]] = source
                    free[reader] += 1
                else:
                    start[reader + 1] += 1
        if not filling:
            for index in range(count):
                start[index + 1] += start[index]
            free = start[:-1].copy()
    return start, sources


@inlined
def _common_bytes(a: IntArray, b: IntArray, size: IntArray) -> int:
    """Return the bytes of the common items of two ascending lists. O(short log long)."""
    short, long = (a, b) if a.shape[0] <= b.shape[0] else (b, a)
    common = 0
    if long.shape[0] == 0:
        return common
    for i in range(short.shape[0]):
        index = np.searchsorted(long, short[i])
        if index < long.shape[0] and long[index] == short[i]:
            common += size[short[i]]
    return common


@inlined
def _between(
    tables: Tables, part: IntArray, count: int, homes: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the partitions that each one reads from as CSR rows, and the seconds of transfers."""
    op_start, ops = grouped(part, count)
    source_start, sources = _sources_read(tables, part, count)
    start = np.zeros(count + 1, dtype=np.int64)
    parents = np.empty(tables.reads.shape[0], dtype=np.int64)
    passed_s = np.empty(tables.reads.shape[0])
    counted = np.full(part.shape[0], -1, dtype=np.int64)
    bytes_from, n_pairs = np.full(count, -1, dtype=np.int64), 0
    for child in range(count):
        for j in range(op_start[child], op_start[child + 1]):
            for i in range(tables.read_start[ops[j]], tables.read_start[ops[j] + 1]):
                maker = tables.reads[i]
                parent = part[maker]
                if parent == child or counted[maker] == child:
                    continue
                counted[maker] = child
                if bytes_from[parent] < 0:
                    bytes_from[parent] = 0
                    parents[n_pairs] = parent
                    n_pairs += 1
                bytes_from[parent] += tables.output[maker]
        for k in range(start[child], n_pairs):
            parent = parents[k]
            passed = bytes_from[parent]
            bytes_from[parent] = -1
            passed_s[k] = 0.0
            if homes[parent] != homes[child]:
                a = sources[source_start[parent] : source_start[parent + 1]]
                b = sources[source_start[child] : source_start[child + 1]]
                passed += _common_bytes(a, b, tables.source_bytes)
                passed_s[k] = passed / tables.bytes_per_s
        start[child + 1] = n_pairs
    return start, parents[:n_pairs], passed_s[:n_pairs]


class Quotient(NamedTuple):
    """The graph of P partitions, and the longest path up to each."""

    order: IntArray
    """Topological order of the partitions; shorter than P if there is a cycle."""
    parent_start: IntArray
    parents: IntArray
    """Partitions that each one reads from, as CSR rows."""
    passed_s: FloatArray
    """Seconds of the transfer from each of `parents`."""
    within_s: FloatArray
    """Critical path inside each partition."""
    begin_s: FloatArray
    """Longest path ending before each partition."""


@compiled
def quotient_of(tables: Tables, part: IntArray, count: int, homes: IntArray) -> Quotient:
    """Return the graph of partitions and its longest paths. O(reads + common sources).

    `homes` numbers the lists of devices: partitions with equal numbers have the same devices.
    """
    within = _within_s(tables.seconds, tables.read_start, tables.reads, part, count)
    start, parents, passed_s = _between(tables, part, count, homes)
    child_start, children, places = transposed(start, parents, count)
    waits = start[1:] - start[:-1]
    queue, first, last = np.empty(count, dtype=np.int64), 0, 0
    for part_id in range(count):
        if waits[part_id] == 0:
            queue[last] = part_id
            last += 1
    begin_s = np.zeros(count)
    while first < last:
        part_id = queue[first]
        first += 1
        end_s = begin_s[part_id] + within[part_id]
        for k in range(child_start[part_id], child_start[part_id + 1]):
            child = children[k]
            begin_s[child] = max(begin_s[child], end_s + passed_s[places[k]])
            waits[child] -= 1
            if waits[child] == 0:
                queue[last] = child
                last += 1
    return Quotient(queue[:last], start, parents, passed_s, within, begin_s)


@compiled
def path_over_partitions_s(tables: Tables, part: IntArray, count: int, homes: IntArray) -> float:
    """Return the longest path over partitions, or -1 if they form a cycle."""
    quotient = quotient_of(tables, part, count, homes)
    if quotient.order.shape[0] < count:
        return -1.0
    longest_s = 0.0
    for part_id in range(count):
        longest_s = max(longest_s, quotient.begin_s[part_id] + quotient.within_s[part_id])
    return longest_s


def latency_s(problem: StaticProblem, plan: StaticPlan) -> float:
    """Return the predicted latency of one input through the graph, in seconds. O(reads).

    Raises:
        CycleError: if partitions wait for each other.
        SpecError: if the problem has no transfer rate.

    """
    if not problem.bytes_per_s > 0:
        raise SpecError(
            f"a latency needs a positive transfer rate, got {problem.bytes_per_s} bytes/s;"
            " say how fast devices exchange tensors"
        )
    count = len(plan.devices_of_partition)
    numbers: dict[tuple[int, ...], int] = {}
    for homes in plan.devices_of_partition:
        numbers.setdefault(homes, len(numbers))
    home_of = np.array([numbers[homes] for homes in plan.devices_of_partition], dtype=np.int64)
    tables = tables_of(problem.graph, problem.bytes_per_s)
    longest_s = path_over_partitions_s(tables, plan.partition_of, count, home_of)
    if longest_s < 0:
        raise CycleError(
            f"the {count} partitions wait for each other in a circle;"
            " join those in the circle, or split the partition that it passes twice"
        )
    return longest_s


# Memory.


@compiled
def _used_bytes(graph: GraphArrays, part: IntArray, count: int) -> IntArray:
    """Return the bytes of each set."""
    used = np.zeros(count, dtype=np.int64)
    counted = np.full(graph.source_bytes.shape[0], -1, dtype=np.int64)
    # Set by set, so that one mark per source shows whether the current set has counted it.
    _, in_sets = grouped(part, count)
    for index in range(in_sets.shape[0]):
        op = in_sets[index]
        part_id = part[op]
        used[part_id] += graph.total[op]
        for i in range(graph.read_start[op], graph.read_start[op + 1]):
            if part[graph.reads[i]] != part_id:
                used[part_id] += graph.output[graph.reads[i]]
        for i in range(graph.source_start[op], graph.source_start[op + 1]):
            source = graph.sources[i]
            if counted[source] != part_id:
                counted[source] = part_id
                used[part_id] += graph.source_bytes[source]
    return used


def used_bytes(graph: StaticGraph, partition_of: IntArray, count: int) -> IntArray:
    """Return the bytes needed by each partition. Shape (count,).

    Given devices in place of partitions: the bytes needed by each device, whose partitions share
    the values they make and read.

    Args:
        graph: the operators.
        partition_of: partition of each operator, 0 to count - 1. Shape (n,).
        count: number of partitions; one without an operator needs 0.

    """
    return _used_bytes(arrays_of(graph), partition_of, count)
