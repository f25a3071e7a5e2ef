"""What a plan costs: the critical path over partitions, as torch's partitioner counts it.

The rules are those of ``get_latency_of_partitioned_graph`` and what it calls in
``torch.fx.experimental.partitioner_utils``:

- a partition takes its critical path: operators beside each other run at the same time;
- from a partition to one that reads from it passes each output that is read, and each source that
  both read, once; that takes their bytes over the rate, or nothing between partitions with the
  same devices;
- the graph takes the longest path over partitions.

Sums run in torch's order, so the figures are equal to the last bit. Torch walks every path by
recursion, 2^k of them through k diamonds; here each read is looked at once.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.errors import CycleError, SpecError
from fxpart.support.compiled import compiled
from fxpart.torch_compat.accounting.problem import (
    GraphArrays,
    StaticGraph,
    StaticPlan,
    StaticProblem,
    arrays_of,
    grouped,
    turned,
)
from fxpart.torch_compat.accounting.tables import Tables, tables_of

__all__ = ["Quotient", "latency_s", "path_over_partitions_s", "quotient_of", "used_bytes"]


@compiled
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


@compiled
def _held(tables: Tables, part: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the sources that each partition reads as CSR rows, ascending, each once."""
    start = np.zeros(count + 1, dtype=np.int64)
    held = np.empty(tables.users.shape[0], dtype=np.int64)
    place = np.empty(0, dtype=np.int64)
    for filling in (False, True):
        last = np.full(count, -1, dtype=np.int64)
        for source in range(tables.source_bytes.shape[0]):
            for i in range(tables.user_start[source], tables.user_start[source + 1]):
                here = part[tables.users[i]]
                if last[here] == source:
                    continue
                last[here] = source
                if filling:
                    held[place[here]] = source
                    place[here] += 1
                else:
                    start[here + 1] += 1
        if not filling:
            for index in range(count):
                start[index + 1] += start[index]
            place = start[:-1].copy()
    return start, held


@compiled
def _common_bytes(a: IntArray, b: IntArray, size: IntArray) -> int:
    """Return the bytes of what two ascending lists have in common. O(short log long)."""
    short, long = (a, b) if a.shape[0] <= b.shape[0] else (b, a)
    common = 0
    if long.shape[0] == 0:
        return common
    for i in range(short.shape[0]):
        at = np.searchsorted(long, short[i])
        if at < long.shape[0] and long[at] == short[i]:
            common += size[short[i]]
    return common


@compiled
def _between(
    tables: Tables, part: IntArray, count: int, homes: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return which partitions each one reads from, as CSR rows, and the seconds of each pair."""
    op_start, ops = grouped(part, count)
    held_start, held = _held(tables, part, count)
    start = np.zeros(count + 1, dtype=np.int64)
    parents = np.empty(tables.reads.shape[0], dtype=np.int64)
    passed_s = np.empty(tables.reads.shape[0])
    counted = np.full(part.shape[0], -1, dtype=np.int64)
    bytes_from, found = np.full(count, -1, dtype=np.int64), 0
    for here in range(count):
        for j in range(op_start[here], op_start[here + 1]):
            for i in range(tables.read_start[ops[j]], tables.read_start[ops[j] + 1]):
                maker = tables.reads[i]
                there = part[maker]
                if there == here or counted[maker] == here:
                    continue
                counted[maker] = here
                if bytes_from[there] < 0:
                    bytes_from[there] = 0
                    parents[found] = there
                    found += 1
                bytes_from[there] += tables.output[maker]
        for k in range(start[here], found):
            there = parents[k]
            passed = bytes_from[there]
            bytes_from[there] = -1
            passed_s[k] = 0.0
            if homes[there] != homes[here]:
                a = held[held_start[there] : held_start[there + 1]]
                b = held[held_start[here] : held_start[here + 1]]
                passed += _common_bytes(a, b, tables.source_bytes)
                passed_s[k] = passed / tables.bytes_per_s
        start[here + 1] = found
    return start, parents[:found], passed_s[:found]


class Quotient(NamedTuple):
    """The graph of P partitions, and the longest path up to each."""

    order: IntArray
    """Partitions, each after those that it reads from; fewer than P when there is a circle."""
    parent_start: IntArray
    parents: IntArray
    """Partitions that each one reads from, as CSR rows."""
    passed_s: FloatArray
    """Seconds of the transfer from each of `parents`."""
    within_s: FloatArray
    """Critical path inside each partition."""
    begin_s: FloatArray
    """Longest path that ends before each partition."""


@compiled
def quotient_of(tables: Tables, part: IntArray, count: int, homes: IntArray) -> Quotient:
    """Return the graph of partitions, and its longest paths. O(reads), and common sources.

    `homes` numbers the lists of devices: partitions with the same number are on the same.
    """
    within = _within_s(tables.seconds, tables.read_start, tables.reads, part, count)
    start, parents, passed_s = _between(tables, part, count, homes)
    child_start, children, places = turned(start, parents, count)
    waits = start[1:] - start[:-1]
    queue, first, last = np.empty(count, dtype=np.int64), 0, 0
    for here in range(count):
        if waits[here] == 0:
            queue[last] = here
            last += 1
    begin_s = np.zeros(count)
    while first < last:
        here = queue[first]
        first += 1
        end_s = begin_s[here] + within[here]
        for k in range(child_start[here], child_start[here + 1]):
            there = children[k]
            begin_s[there] = max(begin_s[there], end_s + passed_s[places[k]])
            waits[there] -= 1
            if waits[there] == 0:
                queue[last] = there
                last += 1
    return Quotient(queue[:last], start, parents, passed_s, within, begin_s)


@compiled
def path_over_partitions_s(tables: Tables, part: IntArray, count: int, homes: IntArray) -> float:
    """Return the longest path over partitions, or -1 when they wait for each other in a circle."""
    quotient = quotient_of(tables, part, count, homes)
    if quotient.order.shape[0] < count:
        return -1.0
    longest_s = 0.0
    for here in range(count):
        longest_s = max(longest_s, quotient.begin_s[here] + quotient.within_s[here])
    return longest_s


def latency_s(problem: StaticProblem, plan: StaticPlan) -> float:
    """Return the predicted latency of one input through the graph, in seconds. O(reads).

    Raises:
        CycleError: when partitions wait for each other in a circle.
        SpecError: when the problem has no transfer rate.

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


# Static memory: what a set of operators needs, as torch's partitioner counts it.
#
# A set of operators needs, as in ``Partition.recalculate_mem_size`` of
# ``torch.fx.experimental.partitioner_utils``:
#
# - the weights and the output of each of its operators;
# - the output of each operator outside the set that one inside reads, once for each *reader*;
# - each source (placeholder or ``get_attr``) that any of them reads, once.
#
# All outputs count, however short they live. Counting by reader is what torch does; it also makes
# the figure a sum over operators and reads, so that one move changes it by what it touches.


@compiled
def _used_bytes(graph: GraphArrays, part: IntArray, count: int) -> IntArray:
    """Return the bytes of each set."""
    used = np.zeros(count, dtype=np.int64)
    counted = np.full(graph.source_bytes.shape[0], -1, dtype=np.int64)
    # Set by set, so that one mark for each source says whether this set has counted it.
    _, in_sets = grouped(part, count)
    for at in range(in_sets.shape[0]):
        op = in_sets[at]
        here = part[op]
        used[here] += graph.total[op]
        for i in range(graph.read_start[op], graph.read_start[op + 1]):
            if part[graph.reads[i]] != here:
                used[here] += graph.output[graph.reads[i]]
        for i in range(graph.source_start[op], graph.source_start[op + 1]):
            source = graph.sources[i]
            if counted[source] != here:
                counted[source] = here
                used[here] += graph.source_bytes[source]
    return used


def used_bytes(graph: StaticGraph, partition_of: IntArray, count: int) -> IntArray:
    """Return the bytes that each partition needs. Shape (count,).

    With devices in place of partitions: what each device needs, where several of its partitions
    share what they make and read.

    Args:
        graph: the operators.
        partition_of: partition of each operator, 0 to count - 1. Shape (n,).
        count: number of partitions; one without an operator needs 0.

    """
    return _used_bytes(arrays_of(graph), partition_of, count)
