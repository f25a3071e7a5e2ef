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
from fxpart.static.graph import StaticGraph

__all__ = ["device_bytes", "used_bytes"]


@compiled
def _used_bytes(  # noqa: PLR0917 - a compiled loop takes arrays
    total: IntArray,
    output: IntArray,
    read_start: IntArray,
    reads: IntArray,
    source_bytes: IntArray,
    source_start: IntArray,
    sources: IntArray,
    part: IntArray,
    by_part: IntArray,
    count: int,
) -> IntArray:
    """Return the bytes of each set. `by_part` lists the operators, those of a set together."""
    used = np.zeros(count, dtype=np.int64)
    counted = np.full(source_bytes.shape[0], -1, dtype=np.int64)
    for at in range(by_part.shape[0]):
        op = by_part[at]
        here = part[op]
        used[here] += total[op]
        for i in range(read_start[op], read_start[op + 1]):
            if part[reads[i]] != here:
                used[here] += output[reads[i]]
        for i in range(source_start[op], source_start[op + 1]):
            if counted[sources[i]] != here:
                counted[sources[i]] = here
                used[here] += source_bytes[sources[i]]
    return used


def used_bytes(graph: StaticGraph, partition_of: IntArray, count: int) -> IntArray:
    """Return the bytes that each partition needs. Shape (count,).

    Args:
        graph: the operators.
        partition_of: partition of each operator, 0 to count - 1. Shape (n,).
        count: number of partitions; one without an operator needs 0.

    """
    return _used_bytes(
        graph.total_bytes,
        graph.output_bytes,
        graph.read_start,
        graph.reads,
        graph.source_bytes,
        graph.source_start,
        graph.sources,
        partition_of,
        np.argsort(partition_of, kind="stable"),
        count,
    )


def device_bytes(graph: StaticGraph, device_of: IntArray, devices: int) -> IntArray:
    """Return the bytes that each device needs. Shape (devices,).

    All operators of a device count as one partition, so that what several of its partitions need
    is there once.

    Args:
        graph: the operators.
        device_of: position of the device of each operator. Shape (n,).
        devices: number of devices.

    """
    return used_bytes(graph, device_of, devices)
