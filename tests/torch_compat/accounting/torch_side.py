"""A static graph as an fx graph with sizes, for evaluation by torch's own functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch.fx import Graph, Node
from torch.fx.experimental import accelerator_partitioner as torch_partitioner
from torch.fx.experimental.partitioner_utils import (
    Device,
    NodeLatency,
    Partition,
    get_latency_of_partitioned_graph,
    get_partition_to_latency_mapping,
)

from fxpart.torch_compat.accounting.problem import StaticGraph, StaticProblem


def _called(*_: object) -> None:
    """Stand for an operator; it is never run."""


@dataclass(frozen=True)
class TorchSide:
    """The fx nodes of a static graph."""

    graph: Graph
    ops: list[Node]
    latencies: dict[Node, NodeLatency]


def _sized(node: Node, output: int, total: int) -> None:
    cast("Any", node).size_bytes = SimpleNamespace(output_size=output, total_size=total)


def torch_side(static: StaticGraph) -> TorchSide:
    """Return an fx graph with the same operators, reads and sizes."""
    graph = Graph()
    sources = [graph.placeholder(f"source_{i}") for i in range(len(static.source_bytes))]
    for node, size in zip(sources, static.source_bytes, strict=True):
        _sized(node, int(size), int(size))
    ops: list[Node] = []
    for op in range(static.n_ops):
        of_op = static.sources[static.source_start[op] : static.source_start[op + 1]]
        read = static.reads[static.read_start[op] : static.read_start[op + 1]]
        args = (*(sources[i] for i in of_op), *(ops[i] for i in read))
        ops.append(graph.call_function(_called, args))
        _sized(ops[-1], int(static.output_bytes[op]), int(static.total_bytes[op]))
    graph.output(ops[-1])
    latencies = {
        node: NodeLatency(float(s), 0.0) for node, s in zip(ops, static.latency_s, strict=True)
    }
    return TorchSide(graph, ops, latencies)


def torch_devices(memory: npt.NDArray[np.int64]) -> list[Device]:
    """Return devices whose logical ids are their positions."""
    return [Device(f"device_{i}", int(size), i) for i, size in enumerate(memory)]


def torch_partitions(
    side: TorchSide, partition_of: npt.NDArray[np.int64], homes: Sequence[Sequence[int]]
) -> list[Partition]:
    """Return torch's partitions of these operators, on these devices."""
    partitions = [Partition(index) for index in range(len(homes))]
    for node, index in zip(side.ops, partition_of, strict=True):
        partitions[index].add_node(node)
    for partition, devices in zip(partitions, homes, strict=True):
        partition.logical_device_ids = list(devices)
    torch_partitioner.reorganize_partitions(partitions)
    return partitions


def torch_latency_s(side: TorchSide, partitions: list[Partition], bytes_per_s: float) -> float:
    """Return the latency that torch predicts for these partitions."""
    within = get_partition_to_latency_mapping(partitions, side.latencies)
    return get_latency_of_partitioned_graph(partitions, within, bytes_per_s)


def torch_result(problem: StaticProblem, mode: str) -> tuple[TorchSide, list[Partition]]:
    """Return the final partitions of torch's ``kl_based`` or ``cost_aware``."""
    side = torch_side(problem.graph)
    partitioner = torch_partitioner.Partitioner()
    partitioner.graph_module = cast("Any", SimpleNamespace(graph=side.graph))
    partitioner.devices = torch_devices(problem.memory_bytes)
    search = getattr(partitioner, f"{mode}_partition")
    search(problem.bytes_per_s, side.latencies)
    return side, partitioner.partitions


def has_answer(side: TorchSide, partitions: list[Partition], problem: StaticProblem) -> bool:
    """Return whether each partition has a device, and each device fits its partitions."""
    if any(len(partition.logical_device_ids) != 1 for partition in partitions):
        return False
    for position, memory in enumerate(problem.memory_bytes):
        whole = Partition(0)
        for node in side.ops:
            if any(node in p.nodes for p in partitions if p.logical_device_ids == [position]):
                whole.add_node(node)
        if whole.used_mem_bytes > memory:
            return False
    return True
