"""Arrays for compiled searches: `Tables` of a problem, `Placing` on devices, and longest paths.

If each operator is its own partition, the latency of torch's partitioner is the longest path over
operators. Joining operators of a device into larger partitions never lowers it: a path over
operators lies within one over partitions, which transfers at least as much. So searches assign
devices to operators, and join operators into partitions afterwards.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.support.compiled import compiled
from fxpart.torch_compat.accounting.problem import StaticGraph, transposed

__all__ = [
    "Placing",
    "Tables",
    "fits",
    "head_of",
    "heads",
    "longest",
    "overflow",
    "placing_of",
    "shift",
    "tables_of",
    "tails",
]


class Tables(NamedTuple):
    """A graph in both directions, and the cost of each read between devices.

    With n operators, m sources, E reads. Rows are CSR, as in `StaticGraph`.
    """

    total: IntArray
    """Weights and output of each operator, bytes. Length n."""
    output: IntArray
    """Output of each operator, bytes. Length n."""
    seconds: FloatArray
    """Latency of each operator. Length n."""
    read_start: IntArray
    reads: IntArray
    """Operators that each operator reads. Length E."""
    read_s: FloatArray
    """Seconds of each read if producer and reader are on different devices. Length E."""
    reader_start: IntArray
    readers: IntArray
    """Operators that read each operator, ascending. Length E."""
    reader_s: FloatArray
    """As `read_s`, in the order of `readers`."""
    source_bytes: IntArray
    source_start: IntArray
    sources: IntArray
    """Sources that each operator reads."""
    user_start: IntArray
    users: IntArray
    """Operators that read each source, ascending."""
    bytes_per_s: float
    """Rate of a transfer."""


@compiled
def _shared_bytes(
    read_start: IntArray,
    reads: IntArray,
    source_bytes: IntArray,
    source_start: IntArray,
    sources: IntArray,
) -> IntArray:
    """Return the bytes of the sources shared by producer and reader, for each read."""
    shared = np.zeros(reads.shape[0], dtype=np.int64)
    marked = np.full(source_bytes.shape[0], -1, dtype=np.int64)
    for op in range(read_start.shape[0] - 1):
        if source_start[op] == source_start[op + 1]:
            continue
        for i in range(source_start[op], source_start[op + 1]):
            marked[sources[i]] = op
        for i in range(read_start[op], read_start[op + 1]):
            for j in range(source_start[reads[i]], source_start[reads[i] + 1]):
                if marked[sources[j]] == op:
                    shared[i] += source_bytes[sources[j]]
    return shared


def tables_of(graph: StaticGraph, bytes_per_s: float) -> Tables:
    """Return the tables of `graph`. O(reads log reads).

    A read between devices costs as much as ``get_comm_latency_between`` of
    ``torch.fx.experimental.partitioner_utils`` returns for two partitions of one operator each: it
    transfers the output that is read, and the sources that both read.
    """
    shared = _shared_bytes(
        graph.read_start, graph.reads, graph.source_bytes, graph.source_start, graph.sources
    )
    read_s = (graph.output_bytes[graph.reads] + shared) / bytes_per_s
    reader_start, readers, edge = transposed(graph.read_start, graph.reads, graph.n_ops)
    user_start, users, _ = transposed(graph.source_start, graph.sources, len(graph.source_bytes))
    return Tables(
        graph.total_bytes,
        graph.output_bytes,
        graph.latency_s,
        graph.read_start,
        graph.reads,
        read_s,
        reader_start,
        readers,
        read_s[edge],
        graph.source_bytes,
        graph.source_start,
        graph.sources,
        user_start,
        users,
        float(bytes_per_s),
    )


# `Placing`: devices of operators and their memory, updated by moves.


class Placing(NamedTuple):
    """Devices of n operators, with D devices and m sources. Changed in place."""

    device: IntArray
    """Position of each operator's device. Length n."""
    used: IntArray
    """Bytes needed by each device, as in `accounting.cost.used_bytes`. Length D."""
    source_readers: IntArray
    """Number of readers of each source on each device. Shape (D, m)."""


@compiled
def shift(tables: Tables, placing: Placing, op: int, target: int) -> None:
    """Move `op` to device `target`. O(its reads and readers)."""
    device, used = placing.device, placing.used
    origin = device[op]
    if origin == target:
        return
    used[origin] -= tables.total[op]
    used[target] += tables.total[op]
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        maker = tables.reads[i]
        if device[maker] != origin:
            used[origin] -= tables.output[maker]
        if device[maker] != target:
            used[target] += tables.output[maker]
    for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
        if device[tables.readers[i]] == origin:
            used[origin] += tables.output[op]
        elif device[tables.readers[i]] == target:
            used[target] -= tables.output[op]
    for i in range(tables.source_start[op], tables.source_start[op + 1]):
        source = tables.sources[i]
        placing.source_readers[origin, source] -= 1
        if placing.source_readers[origin, source] == 0:
            used[origin] -= tables.source_bytes[source]
        if placing.source_readers[target, source] == 0:
            used[target] += tables.source_bytes[source]
        placing.source_readers[target, source] += 1
    device[op] = target


@compiled
def placing_of(tables: Tables, device_of: IntArray, devices: int) -> Placing:
    """Return the placing on these devices. O(reads)."""
    source_readers = np.zeros((devices, tables.source_bytes.shape[0]), dtype=np.int64)
    used = np.zeros(devices, dtype=np.int64)
    for op in range(device_of.shape[0]):
        home = device_of[op]
        used[home] += tables.total[op]
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            if device_of[tables.reads[i]] != home:
                used[home] += tables.output[tables.reads[i]]
        for i in range(tables.source_start[op], tables.source_start[op + 1]):
            source = tables.sources[i]
            if source_readers[home, source] == 0:
                used[home] += tables.source_bytes[source]
            source_readers[home, source] += 1
    return Placing(device_of.copy(), used, source_readers)


@compiled
def fits(placing: Placing, memory: IntArray) -> bool:
    """Return whether no device needs more than its memory."""
    return bool((placing.used <= memory).all())


@compiled
def overflow(placing: Placing, memory: IntArray) -> int:
    """Return the total bytes by which devices are over capacity."""
    over = 0
    for device in range(memory.shape[0]):
        over += max(0, placing.used[device] - memory[device])
    return over


# Longest paths over operators, where a read between devices costs its transfer.


@compiled
def head_of(tables: Tables, device: IntArray, head: FloatArray, op: int) -> float:
    """Return the longest path ending with `op`, given those of its operands."""
    begin_s, home = 0.0, device[op]
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        maker = tables.reads[i]
        ready_s = head[maker]
        if device[maker] != home:
            ready_s += tables.read_s[i]
        begin_s = max(begin_s, ready_s)
    return float(begin_s + tables.seconds[op])


@compiled
def heads(tables: Tables, device: IntArray) -> FloatArray:
    """Return the longest path ending with each operator. Shape (n,)."""
    head = np.empty(device.shape[0])
    for op in range(device.shape[0]):
        head[op] = head_of(tables, device, head, op)
    return head


@compiled
def tails(tables: Tables, device: IntArray, tail: FloatArray, last: int) -> None:
    """Set `tail`, the longest path beginning after each operator, up to operator `last`."""
    for op in range(last, -1, -1):
        rest_s, home = 0.0, device[op]
        for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
            reader = tables.readers[i]
            path_s = tables.seconds[reader] + tail[reader]
            if device[reader] != home:
                path_s += tables.reader_s[i]
            rest_s = max(rest_s, path_s)
        tail[op] = rest_s


@compiled
def longest(head: FloatArray) -> float:
    """Return the length of the longest path."""
    longest_s = 0.0
    for op in range(head.shape[0]):
        longest_s = max(longest_s, head[op])
    return longest_s
