"""`Partitioner`: cut an fx module so that its parts fit the devices, under torch's name for it."""

from typing import NamedTuple

import numpy as np
import torch
from torch.fx import GraphModule, Node

from fxpart.core.replicate import replicate
from fxpart.torch_compat.partitioner.checks import check_config, check_modules
from fxpart.torch_compat.partitioner.config import Device, PartitionerConfig
from fxpart.torch_compat.partitioner.dag import DAG, dag_of, emit
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

__all__ = ["PartitionResult", "Partitioner"]


class PartitionResult(NamedTuple):
    """What `Partitioner.partition_graph` returns."""

    dag: DAG
    module_with_submodules: GraphModule


class Partitioner:
    """Cut an fx module into partitions and give each its devices.

    After `partition_graph`: ``partitions``, ``node_to_partition`` (ids by node) and ``devices``.
    """

    graph_module: GraphModule
    """The module that was cut, and below it the one that was traced; there after the first cut."""
    torch_module: torch.nn.Module

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
        """Return the module cut into ``submod_<id>`` children, and the DAG of these.

        Args:
            fx_module: a traced module whose nodes have sizes (`get_size_of_all_nodes`), or an
                exported one (``torch.export.export(...).module()``).
            torch_module: the module that was traced.
            partitioner_config: devices, mode, and what the mode asks for.

        Raises:
            ConfigError: when the configuration lacks something or names what is not there.
            CaptureError: when the graph has no operators, or a node has no size.
            InfeasibleError: when the devices cannot hold the graph in this mode.
            CycleError: when the partitions of an aot mapping wait for each other.

        Each is a ``RuntimeError``, and nothing is emitted then.

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
        emitted = emit(fx_module, self.node_to_partition)
        dag = dag_of(emitted, {f"submod_{p.partition_id}": p for p in partitions})
        return PartitionResult(dag, emitted)


def _saturate(partitions: list[Partition], devices: list[Device]) -> None:
    """Add to each partition the idle devices that replicate its own."""
    homes = tuple(
        tuple(device_positions(p.logical_device_ids, devices, f"partition {p.partition_id}"))
        for p in partitions
    )
    used = np.array([p.used_mem_bytes for p in partitions], dtype=np.int64)
    memory = np.array([d.available_mem_bytes for d in devices], dtype=np.int64)
    for partition, positions in zip(partitions, replicate(used, homes, memory), strict=True):
        partition.logical_device_ids = [devices[position].logical_id for position in positions]
