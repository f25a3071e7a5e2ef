"""`Partitioner`: cut an fx module into parts that fit the devices, and their `DAG`."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.fx import GraphModule, Node

from fxpart.core.replicate import replicate
from fxpart.execution.split.cut import Partitions, cut_module
from fxpart.execution.split.dependencies import PLACELESS
from fxpart.execution.split.graph_module import is_guard
from fxpart.torch_compat.partitioner.checks import check_config, check_modules
from fxpart.torch_compat.partitioner.config import Device, PartitionerConfig
from fxpart.torch_compat.partitioner.devices import device_positions
from fxpart.torch_compat.partitioner.lowering import lower
from fxpart.torch_compat.partitioner.modes import Request, partitions_for
from fxpart.torch_compat.partitioner.node_sizes import get_size_of_all_nodes
from fxpart.torch_compat.partitioner.partition import Partition
from fxpart.torch_compat.partitioner.structure import (
    get_bfs_level_partition,
    get_node_to_partition_mapping,
    set_parents_and_children,
)

__all__ = ["DAG", "DAGNode", "PartitionResult", "Partitioner"]


class DAGNode:
    """A partition in the emitted module: its call, inputs, outputs, devices and bytes."""

    def __init__(
        self,
        submodule_node: Node,
        input_nodes: list[Node],
        output_nodes: list[Node],
        logical_device_ids: list[int],
        size_bytes: int,
    ) -> None:
        self.submodule_node = submodule_node
        self.input_nodes = input_nodes
        self.output_nodes = output_nodes
        self.logical_device_ids = logical_device_ids
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return str(self.submodule_node)


class DAG:
    """The partitions in execution order."""

    def __init__(self) -> None:
        self.nodes: list[DAGNode] = []

    def create_node(
        self,
        submodule_node: Node,
        input_nodes: list[Node],
        output_nodes: list[Node],
        logical_devices: list[int],
        size_bytes: int,
    ) -> None:
        """Add a partition at the end."""
        node = DAGNode(submodule_node, input_nodes, output_nodes, logical_devices, size_bytes)
        self.nodes.append(node)


class PartitionResult(NamedTuple):
    """The result of `Partitioner.partition_graph`."""

    dag: DAG
    module_with_submodules: GraphModule


class Partitioner:
    """Cuts an fx module into partitions and assigns devices to them.

    After `partition_graph`: ``partitions``, ``node_to_partition`` (ids by node) and ``devices``.
    """

    graph_module: GraphModule
    """The last module cut; unset before the first cut."""
    torch_module: torch.nn.Module
    """The traced module of the last cut; unset before the first cut."""

    def __init__(self) -> None:
        self.partitions: list[Partition] = []
        self.node_to_partition: dict[Node, int] = {}
        self.devices: list[Device] = []

    def partition_graph(
        self,
        fx_module: GraphModule,
        torch_module: torch.nn.Module,
        partitioner_config: PartitionerConfig,
    ) -> PartitionResult:
        """Return the module cut into ``submod_<id>`` children, and their DAG.

        Args:
            fx_module: a traced module whose nodes have sizes (`get_size_of_all_nodes`), or an
                exported one (``torch.export.export(...).module()``).
            torch_module: the module that was traced.
            partitioner_config: devices, mode, and options of the mode.

        Raises:
            ConfigError: if the configuration is incomplete or names something missing.
            CaptureError: if the graph has no operators, or a node has no size.
            InfeasibleError: if the graph does not fit the devices in this mode.
            CycleError: if the partitions of an aot mapping wait for each other.

        Each is a ``RuntimeError``, raised before anything is emitted.

        """
        check_modules(fx_module, torch_module)
        check_config(partitioner_config)
        devices = list(partitioner_config.devices)
        get_size_of_all_nodes(fx_module)
        lowered = lower(fx_module, partitioner_config.node_to_latency_mapping)
        partitions = partitions_for(Request(fx_module, partitioner_config, lowered))
        set_parents_and_children(partitions)
        get_bfs_level_partition(partitions)
        if partitioner_config.saturate_host:
            _saturate(partitions, devices)
        self.graph_module, self.torch_module, self.devices = fx_module, torch_module, devices
        self.partitions = partitions
        self.node_to_partition = get_node_to_partition_mapping(partitions)
        emitted = _emit(fx_module, self.node_to_partition)
        dag = _dag_of(emitted, {f"submod_{p.partition_id}": p for p in partitions})
        return PartitionResult(dag, emitted)


def _saturate(partitions: list[Partition], devices: list[Device]) -> None:
    """Add to each partition the idle devices that run its replicas."""
    homes = tuple(
        tuple(device_positions(p.logical_device_ids, devices, f"partition {p.partition_id}"))
        for p in partitions
    )
    used_bytes = np.array([p.used_mem_bytes for p in partitions], dtype=np.int64)
    memory = np.array([d.available_mem_bytes for d in devices], dtype=np.int64)
    for partition, positions in zip(partitions, replicate(used_bytes, homes, memory), strict=True):
        partition.logical_device_ids = [devices[position].logical_id for position in positions]


def _outputs(emitted: GraphModule, call: Node) -> list[Node]:
    """Return the result nodes of a partition: the items of a tuple, or the call itself."""
    users = list(call.users)
    submodule = emitted.get_submodule(str(call.target))
    assert isinstance(submodule, GraphModule)
    returned = submodule.graph.output_node().args[0]
    # Several results are a tuple that is unpacked at once. A single result may be read by several
    # partitions, and may be a tuple itself.
    return users if isinstance(returned, (tuple, list)) and users else [call]


def _dag_of(emitted: GraphModule, submodules: dict[str, Partition]) -> DAG:
    """Return the DAG of an emitted module; `submodules` maps names of children to partitions."""
    dag = DAG()
    for node in emitted.graph.nodes:
        partition = submodules.get(str(node.target)) if node.op == "call_module" else None
        if partition is not None:
            dag.create_node(
                node,
                node.all_input_nodes,
                _outputs(emitted, node),
                partition.logical_device_ids,
                partition.used_mem_bytes,
            )
    return dag


def _emit(fx_module: GraphModule, node_to_partition: Mapping[Node, int]) -> GraphModule:
    """Return a module with a child ``submod_<id>`` for each partition id.

    It has the signature of `fx_module`, including nested inputs and outputs; the input check of an
    exported module runs before the partitions. `fx_module` itself is not changed.

    Raises:
        CycleError: if partitions wait for each other; see `fxpart.split_module`.

    """
    id_of = {
        node: node_to_partition[node]
        for node in fx_module.graph.nodes
        if node.op not in PLACELESS and not is_guard(node)
    }
    ids = list(dict.fromkeys(id_of.values()))
    number = {partition_id: index for index, partition_id in enumerate(ids)}
    children = [f"submod_{partition_id}" for partition_id in ids]
    part_of = {node: number[partition_id] for node, partition_id in id_of.items()}
    return cut_module(fx_module, part_of, Partitions(children, ids, by_number=False))
