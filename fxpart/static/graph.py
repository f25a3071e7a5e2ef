"""`StaticProblem`: operators, devices and one transfer rate, as torch's partitioner sees them."""

from dataclasses import dataclass

from fxpart.graph import FloatArray, IntArray

__all__ = ["StaticGraph", "StaticPlan", "StaticProblem"]


@dataclass(frozen=True, eq=False, slots=True)
class StaticGraph:
    """Call nodes in graph order (`n` of them), and the sources that they read (`m`).

    A source is a placeholder or a ``get_attr`` node. It lies on every device that reads it.
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
    """Call nodes whose output each call node reads, each once, in order of first use."""
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
    """What is placed, and on what."""

    graph: StaticGraph
    memory_bytes: IntArray
    """Memory of each device, by position. Length D."""
    bytes_per_s: float
    """Rate of a transfer between any two devices; 0 where no mode asks for it."""


@dataclass(frozen=True, eq=False, slots=True)
class StaticPlan:
    """A decided placement."""

    partition_of: IntArray
    """Partition of each call node, 0 to P - 1. Length n."""
    devices_of_partition: tuple[tuple[int, ...], ...]
    """Positions of the devices that hold each partition; never empty. Length P."""
