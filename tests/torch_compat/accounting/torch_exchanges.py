"""Torch's kl_based step by step, built from torch's own functions, with its three faults fixed."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch.fx import Node
from torch.fx.experimental import accelerator_partitioner as torch_partitioner
from torch.fx.experimental.partitioner_utils import Partition

from fxpart.torch_compat.accounting.problem import StaticProblem
from tests.torch_compat.accounting.torch_side import (
    TorchSide,
    torch_devices,
    torch_latency_s,
    torch_side,
)


@dataclass
class Exchanges:
    """The result of the corrected steps, and whether torch's own would have differed."""

    side: TorchSide
    partitions: list[Partition]
    applied: int = 0
    """Number of exchanges that lowered the latency."""
    faults: int = 0
    """How often torch would have compared another latency, or looked in another partition."""
    ties: int = 0
    """How often the order within a set decides in torch."""
    stale: bool = False
    """Whether torch would have kept the devices of other partitions."""


def _swap(first: Node | None, second: Node | None, origin: Partition, target: Partition) -> None:
    """Exchange `first` in `origin` with `second` in `target`."""
    if first is not None:
        origin.remove_node(first)
        target.add_node(first)
    if second is not None:
        origin.add_node(second)
        target.remove_node(second)


def _cost_s(result: Exchanges, problem: StaticProblem) -> float:
    """Return the latency on newly chosen devices; infinite without them, or for a cycle."""
    partitions = result.partitions
    torch_partitioner.reorganize_partitions(partitions)
    torch_partitioner.reset_partition_device(partitions)
    if any(torch_partitioner.check_dependency(partition) for partition in partitions):
        return math.inf
    devices = torch_devices(problem.memory_bytes)
    if not torch_partitioner.get_device_to_partitions_mapping(partitions, devices):
        return math.inf
    return torch_latency_s(result.side, partitions, problem.bytes_per_s)


def _try_op(result: Exchanges, problem: StaticProblem, node: Node, now_s: float) -> float:
    """Apply the best exchange of `node` if it lowers the latency; return the latency."""
    ops, partitions = result.side.ops, result.partitions
    origin = next(partition for partition in partitions if node in partition.nodes)
    best: tuple[Node | None, Partition] | None = None
    for target in partitions:
        if target is origin:
            continue
        candidates = [*(other for other in ops if other in target.nodes), None]
        costs = []
        for other in candidates:
            _swap(node, other, origin, target)
            costs.append(_cost_s(result, problem))
            _swap(other, node, origin, target)
        lowest = min(costs)
        result.faults += min(lowest, now_s) != min(costs[-1], now_s)
        if lowest < now_s:
            now_s = lowest
            best = candidates[costs.index(lowest)], target
            result.ties += costs.count(lowest) > 1
    if best is not None:
        _swap(node, best[0], origin, best[1])
        result.applied += 1
        result.stale = node is ops[-1]
    return now_s


def torch_exchanges(problem: StaticProblem) -> Exchanges:
    """Return the result of torch's corrected steps.

    Raises:
        RuntimeError: if torch has no size-based partitions to start from.
    """
    side = torch_side(problem.graph)
    partitioner = torch_partitioner.Partitioner()
    partitioner.graph_module = cast("Any", SimpleNamespace(graph=side.graph))
    partitioner.devices = torch_devices(problem.memory_bytes)
    partitioner.size_based_partition()
    result = Exchanges(side, partitioner.partitions)
    first = [list(partition.logical_device_ids) for partition in result.partitions]
    now_s = torch_latency_s(side, result.partitions, problem.bytes_per_s)
    before = dict(partitioner.node_to_partition)
    for node in side.ops:
        result.faults += node not in result.partitions[before[node]].nodes
        now_s = _try_op(result, problem, node, now_s)
    if result.applied:
        assert _cost_s(result, problem) == now_s
    else:
        torch_partitioner.reorganize_partitions(result.partitions)
        for partition, devices in zip(result.partitions, first, strict=True):
            partition.logical_device_ids = devices
    return result
