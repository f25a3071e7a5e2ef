"""From a configuration to partitions: one function for each mode, in one table."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import GraphModule

from fxpart.errors import InfeasibleError, nearest_names
from fxpart.partitioner.aot import aot_partitions, check_together
from fxpart.partitioner.config import PartitionerConfig, PartitionMode
from fxpart.partitioner.embedding import embeddings
from fxpart.partitioner.errors import ConfigError
from fxpart.partitioner.inplace import ties_of
from fxpart.partitioner.latency import latency_of
from fxpart.partitioner.lowering import Lowered
from fxpart.partitioner.node_sizes import size_of
from fxpart.partitioner.partition import Partition
from fxpart.split.guards import is_guard
from fxpart.static.contraction import Contraction, contract
from fxpart.static.cost_aware import cost_aware
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.kl_based import kl_based
from fxpart.static.memory import used_bytes
from fxpart.static.size_based import size_based
from fxpart.static.sparse_nn import sparse_nn

__all__ = ["MODES", "Request", "partitions_for"]


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What is to be partitioned, and how."""

    module: GraphModule
    config: PartitionerConfig
    lowered: Lowered
    contraction: Contraction | None = None
    """The graph with one operator for those that must stay together."""

    @property
    def problem(self) -> StaticProblem:
        """The same on arrays."""
        graph = self.contraction.graph if self.contraction else self.lowered.graph
        memory = [device.available_mem_bytes for device in self.config.devices]
        rate = float(self.config.transfer_rate_bytes_per_sec)
        return StaticProblem(graph, np.array(memory, dtype=np.int64), rate)


def _size_based(request: Request) -> StaticPlan:
    return size_based(request.problem)


def _sparse_nn(request: Request) -> StaticPlan:
    problem = request.problem
    found = embeddings(request.module, request.lowered.ops)
    if request.contraction:
        # What stays together with an embedding lies where that lies.
        whole_of, parts = request.contraction.whole_of, found
        found = np.zeros(problem.graph.n_ops, dtype=np.bool_)
        found[whole_of[parts]] = True
    return sparse_nn(problem, found)


def _check_costs(request: Request) -> StaticProblem:
    """Return the problem, after checking that it says what operators and transfers cost."""
    config = request.config
    for node in request.lowered.ops:
        latency_of(node, config.node_to_latency_mapping)
    if not config.transfer_rate_bytes_per_sec > 0:
        raise ConfigError(
            f"mode {config.mode.name} needs a positive transfer_rate_bytes_per_sec, got"
            f" {config.transfer_rate_bytes_per_sec}; say how fast devices exchange tensors"
        )
    return request.problem


def _cost_aware(request: Request) -> StaticPlan:
    return cost_aware(_check_costs(request))


def _kl_based(request: Request) -> StaticPlan:
    return kl_based(_check_costs(request))


def _on_one_device(request: Request) -> list[Partition] | None:
    """Return the one partition of a graph that fits the device with the most memory, or None.

    Raises:
        InfeasibleError: when the graph exceeds all devices together.

    """
    lowered, devices = request.lowered, request.config.devices
    needed = sum(size_of(n).total_size for n in (*lowered.sources, *lowered.ops))
    most = max(devices, key=lambda device: device.available_mem_bytes)
    if needed > most.available_mem_bytes:
        there = sum(device.available_mem_bytes for device in devices)
        if needed > there:
            raise InfeasibleError(
                f"devices do not have enough memory for the module: it needs {needed} bytes, the"
                f" {len(devices)} devices have {there}; give {needed - there} bytes more",
                needed_bytes=needed,
                available_bytes=there,
            )
        return None
    partition = Partition(0)
    for node in request.module.graph.nodes:
        if node.op != "output" and not is_guard(node):
            partition.nodes.add(node)
    partition.set_used(needed)
    partition.logical_device_ids = [most.logical_id]
    return [partition]


def _carry_out(plan: StaticPlan, request: Request) -> list[Partition]:
    """Return the partitions of a plan, as `Partition.add_node` would fill them."""
    lowered, devices = request.lowered, request.config.devices
    used = used_bytes(lowered.graph, plan.partition_of, len(plan.devices_of_partition))
    partitions = [Partition(index) for index in range(len(plan.devices_of_partition))]
    graph = lowered.graph
    for op, index in enumerate(plan.partition_of):
        nodes = partitions[index].nodes
        for i in range(graph.source_start[op], graph.source_start[op + 1]):
            nodes.add(lowered.sources[graph.sources[i]])
        nodes.add(lowered.ops[op])
    for partition, taken, homes in zip(partitions, used, plan.devices_of_partition, strict=True):
        partition.set_used(int(taken))
        partition.logical_device_ids = [devices[home].logical_id for home in homes]
    return partitions


def _with_ties(decide: Callable[[Request], StaticPlan], request: Request) -> StaticPlan:
    """Return the plan of `decide` in which no write in place is torn from what it changes."""
    ties = ties_of(request.module, request.lowered)
    if not ties:
        return decide(request)
    contraction = contract(request.lowered.graph, [tie.ops for tie in ties])
    plan = decide(replace(request, contraction=contraction))
    return replace(plan, partition_of=plan.partition_of[contraction.whole_of])


def _unless_one_device_does(
    decide: Callable[[Request], StaticPlan],
) -> Callable[[Request], list[Partition]]:
    """Return a mode that asks `decide` only when no device holds the whole graph."""

    def mode(request: Request) -> list[Partition]:
        return _on_one_device(request) or _carry_out(_with_ties(decide, request), request)

    return mode


def _aot_based(request: Request) -> list[Partition]:
    partitions = aot_partitions(request.config, request.lowered.ops)
    ties = ties_of(request.module, request.lowered)
    check_together(request.config.node_to_partition_mapping, request.lowered.ops, ties)
    return partitions


MODES: dict[PartitionMode, Callable[[Request], list[Partition]]] = {
    PartitionMode.size_based: _unless_one_device_does(_size_based),
    PartitionMode.sparse_nn: _unless_one_device_does(_sparse_nn),
    PartitionMode.cost_aware: _unless_one_device_does(_cost_aware),
    PartitionMode.kl_based: _unless_one_device_does(_kl_based),
    PartitionMode.aot_based: _aot_based,
}
"""How each mode chooses. Torch's ``partition_graph`` is a chain of ifs in its place."""


def partitions_for(request: Request) -> list[Partition]:
    """Return the partitions that the mode of `request` chooses, each with its devices.

    Raises:
        ConfigError: for a mode that is none, or that lacks what it asks for.
        InfeasibleError: when the devices cannot hold the graph.

    """
    # By name, so that a configuration made of torch's own types is understood too.
    mode = PartitionMode.__members__.get(getattr(request.config.mode, "name", ""))
    if mode is None:
        near = nearest_names(str(request.config.mode), [known.name for known in MODES])
        raise ConfigError(f"there is no mode {request.config.mode!r}; {near}")
    return MODES[mode](request)
