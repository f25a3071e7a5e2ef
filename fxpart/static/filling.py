"""`Filling`: operators put into partitions in graph order, one partition open at a time.

What the open partition makes or reads already is there: an operator that joins it adds nothing for
that. Both greedy modes of torch count so (``size_based_partition`` and ``sparse_nn_partition`` of
``torch.fx.experimental.accelerator_partitioner``).
"""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.arrays import GraphArrays

__all__ = ["Filling", "added_bytes", "nothing_filled", "put"]


class Filling(NamedTuple):
    """The partitions so far, of n operators and m sources. Changed in place."""

    part: IntArray
    """Partition of each operator, -1 before it has one. Length n."""
    holder: IntArray
    """The last partition that read each source, -1 before the first. Length m."""


@compiled
def nothing_filled(graph: GraphArrays) -> Filling:
    """Return the filling in which no operator has a partition."""
    part = np.full(graph.total.shape[0], -1, dtype=np.int64)
    return Filling(part, np.full(graph.source_bytes.shape[0], -1, dtype=np.int64))


@compiled
def added_bytes(
    graph: GraphArrays, filling: Filling, alone: IntArray, op: int, partition: int
) -> int:
    """Return the bytes that `op` adds to the open partition.

    `alone` is what each operator needs with all that it reads. Shape (n,).
    """
    added = alone[op]
    for i in range(graph.read_start[op], graph.read_start[op + 1]):
        if filling.part[graph.reads[i]] == partition:
            added -= graph.output[graph.reads[i]]
    for i in range(graph.source_start[op], graph.source_start[op + 1]):
        if filling.holder[graph.sources[i]] == partition:
            added -= graph.source_bytes[graph.sources[i]]
    return int(added)


@compiled
def put(graph: GraphArrays, filling: Filling, op: int, partition: int) -> None:
    """Put `op` into the open partition."""
    filling.part[op] = partition
    for i in range(graph.source_start[op], graph.source_start[op + 1]):
        filling.holder[graph.sources[i]] = partition
