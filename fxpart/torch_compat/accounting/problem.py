"""`StaticProblem`: operators, devices and one transfer rate, as arrays; and loops over CSR rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.support.compiled import compiled

__all__ = [
    "BoolArray",
    "GraphArrays",
    "StaticGraph",
    "StaticPlan",
    "StaticProblem",
    "arrays_of",
    "distinct_rows",
    "grouped",
    "transposed",
]


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class StaticGraph:
    """Call nodes in graph order (`n` of them), and their sources (`m`).

    A source is a placeholder or a ``get_attr`` node. Every device that reads it has a copy.
    """

    names: tuple[str, ...]
    """Names of the call nodes. Length n."""
    total_bytes: IntArray
    """Weights and output of each call node. Length n."""
    output_bytes: IntArray
    """Output of each call node. Length n."""
    latency_s: FloatArray
    """The larger of compute and memory latency of each call node. Length n."""
    read_start: IntArray
    """CSR starts into `reads`. Length n + 1."""
    reads: IntArray
    """Call nodes that each call node reads, each once, in order of first use."""
    source_bytes: IntArray
    """Bytes of each source. Length m."""
    source_start: IntArray
    """CSR starts into `sources`. Length n + 1."""
    sources: IntArray
    """Sources that each call node reads, each once, in order of first use."""

    @property
    def n_ops(self) -> int:
        """Number of call nodes."""
        return len(self.names)


@dataclass(frozen=True, eq=False, slots=True)
class StaticProblem:
    """A graph to place on devices."""

    graph: StaticGraph
    memory_bytes: IntArray
    """Memory of each device, by position. Length D."""
    bytes_per_s: float
    """Transfer rate between any two devices; 0 if the mode does not use it."""


@dataclass(frozen=True, eq=False, slots=True)
class StaticPlan:
    """A placement."""

    partition_of: IntArray
    """Partition of each call node, 0 to P - 1. Length n."""
    devices_of_partition: tuple[tuple[int, ...], ...]
    """Positions of each partition's devices; never empty. Length P."""


class GraphArrays(NamedTuple):
    """Bytes and reads of a `StaticGraph`, for compiled loops."""

    total: IntArray
    """Weights and output of each operator, bytes. Length n."""
    output: IntArray
    """Output of each operator, bytes. Length n."""
    read_start: IntArray
    reads: IntArray
    source_bytes: IntArray
    source_start: IntArray
    sources: IntArray


def arrays_of(graph: StaticGraph) -> GraphArrays:
    """Return the arrays of `graph`, without copying."""
    return GraphArrays(
        graph.total_bytes,
        graph.output_bytes,
        graph.read_start,
        graph.reads,
        graph.source_bytes,
        graph.source_start,
        graph.sources,
    )


# CSR rows.


@compiled
def grouped(keys: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the positions of each key from 0 to `count` - 1 as CSR rows, ascending. O(length)."""
    start = np.zeros(count + 1, dtype=np.int64)
    for position in range(keys.shape[0]):
        start[keys[position] + 1] += 1
    for key in range(count):
        start[key + 1] += start[key]
    positions, free = np.empty(keys.shape[0], dtype=np.int64), start[:-1].copy()
    for position in range(keys.shape[0]):
        positions[free[keys[position]]] = position
        free[keys[position]] += 1
    return start, positions


@compiled
def transposed(start: IntArray, items: IntArray, count: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the transpose of CSR rows: for each item its rows, and its positions in `items`.

    Args:
        start: CSR starts into `items`.
        items: numbers from 0 to `count` - 1.
        count: number of rows of the transpose.

    """
    transposed_start, places = grouped(items, count)
    row_of = np.empty_like(items)
    for row in range(start.shape[0] - 1):
        row_of[start[row] : start[row + 1]] = row
    return transposed_start, row_of[places], places


def distinct_rows(row: IntArray, item: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the distinct (row, item) pairs as CSR rows, `count` of them; items ascending."""
    pairs = np.unique(np.stack([row, item], axis=1), axis=0)
    return grouped(np.ascontiguousarray(pairs[:, 0]), count)[0], np.ascontiguousarray(pairs[:, 1])
