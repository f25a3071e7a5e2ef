"""`MODES`: for each mode, a function from a request to partitions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import GraphModule, Node

from fxpart.errors import InfeasibleError, nearest_names
from fxpart.execution.split.graph_module import is_guard
from fxpart.torch_compat.accounting.contraction import Contraction, contract
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.latency_modes import cost_aware, kl_based
from fxpart.torch_compat.accounting.problem import BoolArray, StaticPlan, StaticProblem
from fxpart.torch_compat.accounting.size_based import size_based
from fxpart.torch_compat.accounting.sparse_nn import sparse_nn
from fxpart.torch_compat.partitioner.config import ConfigError, PartitionerConfig, PartitionMode
from fxpart.torch_compat.partitioner.devices import device_positions
from fxpart.torch_compat.partitioner.inplace import Tie, ties_of
from fxpart.torch_compat.partitioner.latency import latency_of
from fxpart.torch_compat.partitioner.lowering import Lowered
from fxpart.torch_compat.partitioner.node_sizes import is_item_of_tuple, size_of
from fxpart.torch_compat.partitioner.partition import Partition

__all__ = ["MODES", "Request", "embeddings", "partitions_for"]


# Partitions chosen by the caller, checked and otherwise used unchanged.


def _check_nodes(config: PartitionerConfig, ops: Sequence[Node]) -> None:
    """Refuse a mapping that lacks an operator, or has nodes of another graph."""
    mapping = config.node_to_partition_mapping
    missing = [node.name for node in ops if node not in mapping]
    if missing:
        raise ConfigError(
            f"node_to_partition_mapping leaves out {len(missing)} of {len(ops)} operators, such as"
            f" {', '.join(missing[:3])}; give each call node of this graph a partition"
        )
    foreign = [node.name for node in mapping if node.graph is not ops[0].graph]
    if foreign:
        raise ConfigError(
            f"node_to_partition_mapping has {len(foreign)} nodes of another graph, such as"
            f" {foreign[0]}; take the nodes from the module that is partitioned"
        )


def _devices_of(config: PartitionerConfig, partition_id: int) -> list[int]:
    """Return the logical ids mapped to a partition, after checking them."""
    mapping = config.partition_to_logical_device_mapping
    ids = mapping.get(partition_id)
    if not ids:
        raise ConfigError(
            f"partition {partition_id} has no device: partition_to_logical_device_mapping has "
            f"partitions {list(mapping)[:8]}; give it at least one logical id"
        )
    device_positions(ids, config.devices, f"partition {partition_id}")
    return list(ids)


def _aot_partitions(config: PartitionerConfig, ops: Sequence[Node]) -> list[Partition]:
    """Return the partitions of the configuration's mappings, in their order there.

    Memory is not checked, since the caller decided.

    Raises:
        ConfigError: if an operator has no partition, or a partition no device.

    """
    _check_nodes(config, ops)
    partitions: dict[int, Partition] = {}
    for node, partition_id in config.node_to_partition_mapping.items():
        if node.op == "output":
            continue
        if partition_id not in partitions:
            partition = partitions[partition_id] = Partition(partition_id)
            partition.logical_device_ids = _devices_of(config, partition_id)
        partitions[partition_id].add_node(node)
    return list(partitions.values())


def _check_together(
    partition_of: Mapping[Node, int], ops: Sequence[Node], ties: Sequence[Tie]
) -> None:
    """Refuse partitions that separate tied operators, whose results would be wrong.

    Raises:
        ConfigError: naming operators of two partitions, and the tensor written into.

    """
    for tie in ties:
        first = ops[tie.ops[0]]
        stray = next(
            (o for op in tie.ops if partition_of[o := ops[op]] != partition_of[first]), None
        )
        if stray is not None:
            raise ConfigError(
                f"operators {first.name} and {stray.name} are in partitions {partition_of[first]}"
                f" and {partition_of[stray]}, but share the tensor {tie.tensor}, which is written"
                f" into in place; put {', '.join(ops[op].name for op in tie.ops[:6])}"
                f"{', ...' if len(tie.ops) > 6 else ''} into one partition"
            )


# Partitions found by a mode.


def embeddings(root: GraphModule, ops: Sequence[Node]) -> BoolArray:
    """Return whether each operator is an embedding. Shape (n,).

    An embedding is a call of a module with "Embedding" in the name of its type or of a submodule's
    type; a call of a function with "embedding" in its name, as in exported graphs; or an item of a
    tuple returned by one of these.
    """
    modules: dict[str, bool] = {}
    is_embedding: dict[Node, bool] = {}
    for node in ops:
        target = str(node.target)
        if node.op == "call_module":
            if target not in modules:
                parts = root.get_submodule(target).modules()
                modules[target] = any("Embedding" in type(part).__name__ for part in parts)
            is_embedding[node] = modules[target]
        elif is_item_of_tuple(node):
            is_embedding[node] = is_embedding.get(node.all_input_nodes[0], False)
        else:
            name = getattr(node.target, "__name__", target)
            is_embedding[node] = node.op == "call_function" and "embedding" in name
    return np.array([is_embedding[node] for node in ops], dtype=np.bool_)


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A graph to partition, and the configuration."""

    module: GraphModule
    config: PartitionerConfig
    lowered: Lowered
    contraction: Contraction | None = None
    """The graph in which operators that must stay together are merged."""

    @property
    def problem(self) -> StaticProblem:
        """The problem on arrays."""
        graph = self.contraction.graph if self.contraction else self.lowered.graph
        memory = [device.available_mem_bytes for device in self.config.devices]
        rate = float(self.config.transfer_rate_bytes_per_sec)
        return StaticProblem(graph, np.array(memory, dtype=np.int64), rate)


def _sparse_nn(request: Request) -> StaticPlan:
    problem = request.problem
    is_embedding = embeddings(request.module, request.lowered.ops)
    if request.contraction:
        # Operators that stay together with an embedding count as one.
        whole_of, parts = request.contraction.whole_of, is_embedding
        is_embedding = np.zeros(problem.graph.n_ops, dtype=np.bool_)
        is_embedding[whole_of[parts]] = True
    return sparse_nn(problem, is_embedding)


def _with_costs(request: Request) -> StaticProblem:
    """Return the problem, after checking that it has latencies and a transfer rate."""
    config = request.config
    for node in request.lowered.ops:
        latency_of(node, config.node_to_latency_mapping)
    if not config.transfer_rate_bytes_per_sec > 0:
        raise ConfigError(
            f"mode {config.mode.name} needs a positive transfer_rate_bytes_per_sec, got"
            f" {config.transfer_rate_bytes_per_sec}; say how fast devices exchange tensors"
        )
    return request.problem


def _on_one_device(request: Request) -> list[Partition] | None:
    """Return the single partition of a graph that fits the device with the most memory, or None.

    Raises:
        InfeasibleError: if the graph exceeds the total memory of all devices.

    """
    lowered, devices = request.lowered, request.config.devices
    needed = sum(size_of(n).total_size for n in (*lowered.sources, *lowered.ops))
    largest = max(devices, key=lambda device: device.available_mem_bytes)
    if needed > largest.available_mem_bytes:
        available = sum(device.available_mem_bytes for device in devices)
        if needed > available:
            raise InfeasibleError(
                f"devices do not have enough memory for the module: it needs {needed} bytes, the"
                f" {len(devices)} devices have {available}; give {needed - available} bytes more",
                needed_bytes=needed,
                available_bytes=available,
            )
        return None
    partition = Partition(0)
    for node in request.module.graph.nodes:
        if node.op != "output" and not is_guard(node):
            partition.nodes.add(node)
    partition.set_used(needed)
    partition.logical_device_ids = [largest.logical_id]
    return [partition]


def _partitions_of(plan: StaticPlan, request: Request) -> list[Partition]:
    """Return the partitions of a plan, as `Partition.add_node` would fill them."""
    lowered, devices = request.lowered, request.config.devices
    used_per_partition = used_bytes(
        lowered.graph, plan.partition_of, len(plan.devices_of_partition)
    )
    partitions = [Partition(index) for index in range(len(plan.devices_of_partition))]
    graph = lowered.graph
    for op, index in enumerate(plan.partition_of):
        nodes = partitions[index].nodes
        for i in range(graph.source_start[op], graph.source_start[op + 1]):
            nodes.add(lowered.sources[graph.sources[i]])
        nodes.add(lowered.ops[op])
    for partition, n_bytes, homes in zip(
        partitions, used_per_partition, plan.devices_of_partition, strict=True
    ):
        partition.set_used(int(n_bytes))
        partition.logical_device_ids = [devices[home].logical_id for home in homes]
    return partitions


def _with_ties(decide: Callable[[Request], StaticPlan], request: Request) -> StaticPlan:
    """Return the plan of `decide` for the graph in which tied operators are merged."""
    ties = ties_of(request.module, request.lowered)
    if not ties:
        return decide(request)
    contraction = contract(request.lowered.graph, [tie.ops for tie in ties])
    plan = decide(replace(request, contraction=contraction))
    return replace(plan, partition_of=plan.partition_of[contraction.whole_of])


def _unless_one_device_does(
    decide: Callable[[Request], StaticPlan],
) -> Callable[[Request], list[Partition]]:
    """Return a mode that calls `decide` only if no device fits the whole graph."""

    def mode(request: Request) -> list[Partition]:
        return _on_one_device(request) or _partitions_of(_with_ties(decide, request), request)

    return mode


def _aot_based(request: Request) -> list[Partition]:
    partitions = _aot_partitions(request.config, request.lowered.ops)
    ties = ties_of(request.module, request.lowered)
    _check_together(request.config.node_to_partition_mapping, request.lowered.ops, ties)
    return partitions


MODES: dict[PartitionMode, Callable[[Request], list[Partition]]] = {
    PartitionMode.size_based: _unless_one_device_does(lambda r: size_based(r.problem)),
    PartitionMode.sparse_nn: _unless_one_device_does(_sparse_nn),
    PartitionMode.cost_aware: _unless_one_device_does(lambda r: cost_aware(_with_costs(r))),
    PartitionMode.kl_based: _unless_one_device_does(lambda r: kl_based(_with_costs(r))),
    PartitionMode.aot_based: _aot_based,
}
"""The function of each mode, a chain of ifs in torch's ``partition_graph``."""


def partitions_for(request: Request) -> list[Partition]:
    """Return the partitions chosen by the mode of `request`, each with its devices.

    Raises:
        ConfigError: if the mode is unknown, or a required option is missing.
        InfeasibleError: if the graph does not fit the devices.

    """
    # By name, so configurations of torch's own types work too.
    mode = PartitionMode.__members__.get(getattr(request.config.mode, "name", ""))
    if mode is None:
        near = nearest_names(str(request.config.mode), [known.name for known in MODES])
        raise ConfigError(f"there is no mode {request.config.mode!r}; {near}")
    return MODES[mode](request)
