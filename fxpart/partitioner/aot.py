"""Partitions that the caller has chosen: checked, and otherwise taken as they are."""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fxpart.partitioner.config import PartitionerConfig
from fxpart.partitioner.devices import device_positions
from fxpart.partitioner.errors import ConfigError
from fxpart.partitioner.inplace import Tie
from fxpart.partitioner.partition import Partition

__all__ = ["aot_partitions", "check_together"]


def _check_nodes(config: PartitionerConfig, ops: Sequence[Node]) -> None:
    """Refuse a mapping that leaves out an operator, or speaks of nodes of another graph."""
    mapping = config.node_to_partition_mapping
    missing = [node.name for node in ops if node not in mapping]
    if missing:
        raise ConfigError(
            f"node_to_partition_mapping leaves out {len(missing)} of {len(ops)} operators, such as"
            f" {', '.join(missing[:3])}; give each call node of this graph a partition"
        )
    strange = [node.name for node in mapping if node.graph is not ops[0].graph]
    if strange:
        raise ConfigError(
            f"node_to_partition_mapping has {len(strange)} nodes of another graph, such as"
            f" {strange[0]}; take the nodes from the module that is partitioned"
        )


def _devices_of(config: PartitionerConfig, partition_id: int) -> list[int]:
    """Return the logical ids that the mapping gives a partition, all of them real."""
    mapping = config.partition_to_logical_device_mapping
    ids = mapping.get(partition_id)
    if not ids:
        raise ConfigError(
            f"partition {partition_id} has no device: partition_to_logical_device_mapping"
            f" speaks of partitions {list(mapping)[:8]}; give it at least one logical id"
        )
    device_positions(ids, config.devices, f"partition {partition_id}")
    return list(ids)


def aot_partitions(config: PartitionerConfig, ops: Sequence[Node]) -> list[Partition]:
    """Return the partitions of the configuration's mappings, in the order that these name them.

    Memory is not checked: the caller has decided.

    Raises:
        ConfigError: when an operator has no partition, or a partition no device.

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


def check_together(
    partition_of: Mapping[Node, int], ops: Sequence[Node], ties: Sequence[Tie]
) -> None:
    """Refuse partitions that part a write in place from what it changes: the results were wrong.

    Raises:
        ConfigError: naming operators of two partitions, and the tensor that is written into.

    """
    for tie in ties:
        first = ops[tie.ops[0]]
        other = next(
            (o for op in tie.ops if partition_of[o := ops[op]] != partition_of[first]), None
        )
        if other is not None:
            raise ConfigError(
                f"operators {first.name} and {other.name} are in partitions {partition_of[first]}"
                f" and {partition_of[other]}, but share the tensor {tie.tensor}, which is written"
                f" into in place; put {', '.join(ops[op].name for op in tie.ops[:6])}"
                f"{', ...' if len(tie.ops) > 6 else ''} into one partition"
            )
