"""`Tables`: a problem of least latency, laid out for compiled loops."""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.graph import StaticGraph
from fxpart.static.rows import turned

__all__ = ["Tables", "tables_of"]


class Tables(NamedTuple):
    """A graph in both directions, and what each read costs between devices.

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
    """Seconds that each read costs when maker and reader are on different devices. Length E."""
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
    """Return the bytes of the sources that maker and reader have in common, for each read."""
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

    A read between devices costs what ``get_comm_latency_between`` of
    ``torch.fx.experimental.partitioner_utils`` says of two partitions of one operator each: the
    output that is read, and the sources that both read.
    """
    shared = _shared_bytes(
        graph.read_start, graph.reads, graph.source_bytes, graph.source_start, graph.sources
    )
    read_s = (graph.output_bytes[graph.reads] + shared) / bytes_per_s
    reader_start, readers, place = turned(graph.read_start, graph.reads, graph.n_ops)
    user_start, users, _ = turned(graph.source_start, graph.sources, len(graph.source_bytes))
    return Tables(
        graph.total_bytes,
        graph.output_bytes,
        graph.latency_s,
        graph.read_start,
        graph.reads,
        read_s,
        reader_start,
        readers,
        read_s[place],
        graph.source_bytes,
        graph.source_start,
        graph.sources,
        user_start,
        users,
        float(bytes_per_s),
    )
