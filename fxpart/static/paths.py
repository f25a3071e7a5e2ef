"""Longest paths over operators, where a read between devices takes its transfer.

With each operator a partition of its own, the latency of torch's partitioner is the longest path
over operators. Joining operators of a device to larger partitions never lowers it: a path over
operators lies within one over partitions, which transfer at least the same. So searches look for
devices of operators, and partitions are joined afterwards.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.tables import Tables

__all__ = ["head_of", "heads", "longest", "tails"]


@compiled
def head_of(tables: Tables, device: IntArray, head: FloatArray, op: int) -> float:
    """Return the longest path that ends with `op`, given those of what it reads."""
    begin_s, here = 0.0, device[op]
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        maker = tables.reads[i]
        ready_s = head[maker]
        if device[maker] != here:
            ready_s += tables.read_s[i]
        begin_s = max(begin_s, ready_s)
    return float(begin_s + tables.seconds[op])


@compiled
def heads(tables: Tables, device: IntArray) -> FloatArray:
    """Return the longest path that ends with each operator. Shape (n,)."""
    head = np.empty(device.shape[0])
    for op in range(device.shape[0]):
        head[op] = head_of(tables, device, head, op)
    return head


@compiled
def tails(tables: Tables, device: IntArray, tail: FloatArray, last: int) -> None:
    """Set `tail` up to operator `last`: the longest path that begins after each operator."""
    for op in range(last, -1, -1):
        rest_s, here = 0.0, device[op]
        for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
            reader = tables.readers[i]
            path_s = tables.seconds[reader] + tail[reader]
            if device[reader] != here:
                path_s += tables.reader_s[i]
            rest_s = max(rest_s, path_s)
        tail[op] = rest_s


@compiled
def longest(head: FloatArray) -> float:
    """Return the longest path of all."""
    longest_s = 0.0
    for op in range(head.shape[0]):
        longest_s = max(longest_s, head[op])
    return longest_s
