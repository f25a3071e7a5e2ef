"""Evaluate an answer of either side with torch's own functions.

The answer is rebuilt from names as torch's `Partition` objects with its logical device ids; torch's
functions then give its latency and its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx.experimental.accelerator_partitioner import check_dependency, reorganize_partitions
from torch.fx.experimental.partitioner_utils import (
    NodeLatency,
    Partition,
    get_latency_of_partitioned_graph,
    get_partition_to_latency_mapping,
)
from torch.fx.passes.graph_manipulation import get_size_of_all_nodes

from benchmarks.static_case import Case, fresh_copy

__all__ = ["Judge", "Verdict", "make_judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The evaluation of an answer by torch's functions."""

    latency_s: float
    """NaN if the partitions form a cycle."""
    fault: str
    """Why the answer is invalid, or an empty string."""

    @property
    def valid(self) -> bool:
        """Whether the answer can run on the devices."""
        return not self.fault


@dataclass(frozen=True, eq=False, slots=True)
class Judge:
    """A graph sized by torch, to evaluate answers to one case."""

    case: Case
    nodes: Mapping[str, fx.Node]
    latency: Mapping[fx.Node, NodeLatency]

    def verdict(
        self, partition_of: Mapping[str, int], devices: Mapping[int, Sequence[int]]
    ) -> Verdict:
        """Return the verdict on a partition of each operator and the devices of each partition."""
        missing = [name for name in self.case.operators if name not in partition_of]
        if missing:
            return Verdict(float("nan"), f"{len(missing)} operators without a partition")
        parts = self._rebuild(partition_of, devices)
        if any(check_dependency(part) for part in parts):
            return Verdict(float("nan"), "a cycle of partitions")
        by_part = get_partition_to_latency_mapping(parts, dict(self.latency))
        latency_s = get_latency_of_partitioned_graph(parts, by_part, self.case.bytes_per_s)
        return Verdict(latency_s, self._fault(parts))

    def _rebuild(
        self, partition_of: Mapping[str, int], devices: Mapping[int, Sequence[int]]
    ) -> list[Partition]:
        parts = {number: Partition(number) for number in sorted(set(partition_of.values()))}
        for name in self.case.operators:
            parts[partition_of[name]].add_node(self.nodes[name])
        for number, part in parts.items():
            part.logical_device_ids = list(devices[number])
        rebuilt = list(parts.values())
        reorganize_partitions(rebuilt)
        return rebuilt

    def _fault(self, parts: list[Partition]) -> str:
        """Return the fault: no device, or more bytes than memory; else an empty string.

        The bytes of a device are those of one partition with all of its nodes, torch's most lenient
        count: an answer is called invalid only if it fits by no way of counting.
        """
        for part in parts:
            if not part.logical_device_ids:
                return "a partition without a device"
        for device, memory in enumerate(self.case.memory_bytes):
            combined = Partition(0)
            for part in parts:
                if device in part.logical_device_ids:
                    combined.nodes |= part.nodes
            combined.recalculate_mem_size()
            if combined.used_mem_bytes > memory:
                return f"device {device} holds {combined.used_mem_bytes} of {memory} bytes"
        return ""


def make_judge(case: Case) -> Judge:
    """Return a judge for answers to `case`."""
    traced = fresh_copy(case)
    get_size_of_all_nodes(traced, list(case.inputs))
    nodes = {node.name: node for node in traced.graph.nodes}
    latency = {nodes[name]: NodeLatency(*pair) for name, pair in case.latency_s.items()}
    return Judge(case, nodes, latency)
