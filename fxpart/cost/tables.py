"""A graph and a topology as flat tables for the inner loops."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.topology import Topology

__all__ = [
    "CostTables",
    "LatencySource",
    "MemoryTables",
    "cost_tables",
    "freed_after_readers",
    "launch_s",
    "memory_tables",
    "same_on_every_device",
]

# Sources of operator times: a roofline, a profile or a calibration.


class LatencySource(Protocol):
    """A source of operator times."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        ...


def same_on_every_device(seconds: FloatArray, topology: Topology) -> FloatArray:
    """Repeat `seconds` (shape (n,)) for each device of `topology`, shape (n, D)."""
    return np.repeat(seconds[:, None], topology.n_devices, axis=1)


class CostTables(NamedTuple):
    """Tables for the simulated schedule. A named tuple, as numba accepts those."""

    read_start: IntArray
    reads: IntArray
    producer: IntArray
    made_start: IntArray
    """CSR by operator: it produces values ``made_start[op]`` to ``made_start[op + 1] - 1``."""
    reader_start: IntArray
    readers: IntArray
    """CSR by value: its readers, in order."""
    value_bytes: IntArray
    op_time_s: FloatArray
    """Shape (n, D)."""
    s_per_byte: FloatArray
    """Shape (D, D)."""
    link_latency_s: FloatArray
    """Shape (D, D)."""
    issue_s: FloatArray
    """Time at which the host has launched each operator, its earliest start. Shape (n,)."""


class MemoryTables(NamedTuple):
    """Tables for the memory of a device."""

    read_start: IntArray
    reads: IntArray
    producer: IntArray
    made_start: IntArray
    reader_start: IntArray
    readers: IntArray
    value_bytes: IntArray
    alloc_bytes: IntArray
    base: IntArray
    is_output: npt.NDArray[np.bool_]
    held: IntArray
    """As `OpGraph.value_held`; all -1 if there are no references."""
    use_start: IntArray
    uses: IntArray
    weight_bytes: IntArray
    """Bytes of each weight including its optimizer state."""


def _made_start(graph: OpGraph) -> IntArray:
    """Return the first value of each operator; values are in order of their producer."""
    return np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1)).astype(np.int64)


def _readers(graph: OpGraph) -> tuple[IntArray, IntArray]:
    """Return the operators that read each value, as CSR."""
    reader = np.repeat(np.arange(graph.n_ops, dtype=np.int64), np.diff(graph.read_start))
    by_value = np.argsort(graph.reads, kind="stable")
    start = np.zeros(graph.n_values + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.reads, minlength=graph.n_values), out=start[1:])
    return start, reader[by_value]


def memory_tables(graph: OpGraph) -> MemoryTables:
    """Return the memory tables of `graph`."""
    reader_start, readers = _readers(graph)
    return MemoryTables(
        read_start=graph.read_start,
        reads=graph.reads,
        producer=graph.value_producer,
        made_start=_made_start(graph),
        reader_start=reader_start,
        readers=readers,
        value_bytes=graph.value_bytes,
        alloc_bytes=graph.value_alloc_bytes,
        base=graph.value_base,
        is_output=graph.value_is_output,
        held=graph.value_held if len(graph.value_held) else np.full(graph.n_values, -1),
        use_start=graph.use_start,
        uses=graph.uses,
        weight_bytes=graph.weight_bytes + graph.weight_state_bytes,
    )


def freed_after_readers(memory: MemoryTables) -> MemoryTables:
    """Return `memory` for a run of the captured graph, without references by Python variables."""
    return memory._replace(held=np.full(len(memory.producer), -1, dtype=np.int64))


def cost_tables(
    graph: OpGraph, memory: MemoryTables, topology: Topology, latency: LatencySource
) -> CostTables:
    """Return the latency tables of `graph` on `topology`; `memory` has the tables of `graph`."""
    return CostTables(
        read_start=memory.read_start,
        reads=memory.reads,
        producer=memory.producer,
        made_start=memory.made_start,
        reader_start=memory.reader_start,
        readers=memory.readers,
        value_bytes=memory.value_bytes,
        op_time_s=latency.op_time_s(graph, topology),
        s_per_byte=1.0 / topology.bytes_per_s,
        link_latency_s=np.ascontiguousarray(topology.latency_s, dtype=np.float64),
        issue_s=np.cumsum(launch_s(graph, topology)),
    )


def launch_s(graph: OpGraph, topology: Topology) -> FloatArray:
    """Return the host time to launch each operator, shape (n,).

    Operators that neither compute nor move anything are not launched. Neither are weight updates,
    since torch's ``foreach`` and ``fused`` update many weights at once.
    """
    works = ((graph.flops > 0) | (graph.moved_bytes > 0)) & ~graph.is_update
    return np.where(works, float(topology.host_launch_s), 0.0)
