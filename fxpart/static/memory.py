"""Static memory: what a set of operators needs, as torch's partitioner counts it.

A set of operators needs, as in ``Partition.recalculate_mem_size`` of
``torch.fx.experimental.partitioner_utils``:

- the weights and the output of each of its operators;
- the output of each operator outside the set that one inside reads, once for each *reader*;
- each source (placeholder or ``get_attr``) that any of them reads, once.

All outputs count, however short they live. Counting by reader is what torch does; it also makes the
figure a sum over operators and reads, so that one move changes it by what it touches.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.arrays import GraphArrays, arrays_of
from fxpart.static.graph import StaticGraph
from fxpart.static.rows import grouped

__all__ = ["used_bytes"]


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
