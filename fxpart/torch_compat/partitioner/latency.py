"""Latencies of partitions along the critical path, as torch's partitioner counts them.

Torch walks every path recursively; here each node and each partition is visited once. Sums run in
torch's order, from the first operator on, so that they are bitwise equal.
"""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fxpart.errors import nearest_names
from fxpart.torch_compat.partitioner.checks import check_latency, shown
from fxpart.torch_compat.partitioner.config import ConfigError, NodeLatency, PartitionLatency
from fxpart.torch_compat.partitioner.node_sizes import SOURCES
from fxpart.torch_compat.partitioner.partition import Partition
from fxpart.torch_compat.partitioner.structure import running_order

__all__ = [
    "get_comm_latency_between",
    "get_latency_of_one_partition",
    "get_latency_of_partitioned_graph",
    "get_partition_to_latency_mapping",
    "latency_of",
]

_NONE = PartitionLatency(0.0, 0.0, 0.0)


def latency_of(node: Node, node_to_latency_mapping: Mapping[Node, NodeLatency]) -> NodeLatency:
    """Return the latency of an operator.

    Raises:
        ConfigError: if the mapping has no valid latency for it.

    """
    if not isinstance(node_to_latency_mapping, Mapping):
        raise ConfigError(
            f"node_to_latency_mapping is {shown(node_to_latency_mapping)}; give a dict of nodes"
            " and NodeLatency"
        )
    latency = node_to_latency_mapping.get(node)
    if latency is None:
        names = [known.name for known in node_to_latency_mapping]
        near = nearest_names(node.name, names)
        if node.name in names:
            near = "the one of this name is of another graph"
        raise ConfigError(
            f"operator {node.name} has no latency: node_to_latency_mapping holds"
            f" {len(node_to_latency_mapping)} nodes ({near}); add a NodeLatency for each call node"
        )
    check_latency(node, latency)
    return latency


def get_latency_of_one_partition(
    partition: Partition, node_to_latency_mapping: Mapping[Node, NodeLatency]
) -> PartitionLatency:
    """Return the sums along the longest path of operators inside the partition.

    Independent operators run concurrently. If paths are equally long, the first in graph order
    counts.

    Raises:
        ConfigError: if an operator has no latency.

    """
    until: dict[Node, PartitionLatency] = {}
    longest = _NONE
    for node in sorted(n for n in partition.nodes if n.op not in SOURCES):
        latency = latency_of(node, node_to_latency_mapping)
        before = _NONE
        for operand in node.all_input_nodes:
            path = until.get(operand)
            if path is not None and path.overall_latency_sec > before.overall_latency_sec:
                before = path
        until[node] = PartitionLatency(
            before.mem_latency_sec + latency.mem_latency_sec,
            before.computer_latency_sec + latency.computer_latency_sec,
            before.overall_latency_sec + max(latency.computer_latency_sec, latency.mem_latency_sec),
        )
        if until[node].overall_latency_sec > longest.overall_latency_sec:
            longest = until[node]
    return longest


def get_partition_to_latency_mapping(
    partitions: Sequence[Partition], node_to_latency_mapping: Mapping[Node, NodeLatency]
) -> dict[Partition, PartitionLatency]:
    """Return the `get_latency_of_one_partition` of each partition."""
    return {p: get_latency_of_one_partition(p, node_to_latency_mapping) for p in partitions}


def get_comm_latency_between(
    parent_partition: Partition,
    child_partition: Partition,
    transfer_rate_bytes_per_sec: float,
) -> float:
    """Return the seconds of the transfer from parent to child, each tensor sent once.

    Zero between partitions on the same devices.

    Raises:
        ConfigError: if the devices differ and the rate is not positive.

    """
    parents = [parent_partition]
    return _comm_latencies(parents, child_partition, transfer_rate_bytes_per_sec, {})[0]


def _comm_latencies(
    parents: Sequence[Partition],
    child: Partition,
    rate: float,
    holders: Mapping[Node, Sequence[Partition]],
) -> list[float]:
    """Return the seconds of the transfer from each parent to `child`.

    `holders` may map nodes to the partitions containing them, which avoids checking every parent.
    """
    away = [
        not parent.logical_device_ids or parent.logical_device_ids != child.logical_device_ids
        for parent in parents
    ]
    if any(away) and not rate > 0:
        raise ConfigError(
            f"transfer_rate_bytes_per_sec is {rate}, but partition {child.partition_id} receives"
            " tensors from another device; give a positive rate"
        )
    sent = dict.fromkeys(parents, 0)
    for operand in dict.fromkeys(x for node in child.nodes for x in node.all_input_nodes):
        # Unlike elsewhere, a node without a size counts as 0, as in torch.
        size = getattr(operand, "size_bytes", None)
        near = holders.get(operand, parents)
        for parent in near if len(near) < len(parents) else parents:
            if size is not None and parent in sent and operand in parent.nodes:
                sent[parent] += size.output_size
    return [sent[p] / rate if apart else 0.0 for p, apart in zip(parents, away, strict=True)]


def get_latency_of_partitioned_graph(
    partitions: Sequence[Partition],
    partition_to_latency_mapping: Mapping[Partition, PartitionLatency],
    transfer_rate_bytes_per_sec: float,
) -> float:
    """Return the seconds of the longest path of partitions and transfers between them.

    Raises:
        CycleError: if partitions wait for each other.
        ConfigError: if tensors change device and the rate is not positive.

    """
    holders: dict[Node, list[Partition]] = {}
    for partition in partitions:
        for node in partition.nodes:
            holders.setdefault(node, []).append(partition)
    until: dict[Partition, float] = {}
    for partition in running_order(partitions):
        parents = list(partition.parents)
        sent = _comm_latencies(parents, partition, transfer_rate_bytes_per_sec, holders)
        start = max((until[p] + s for p, s in zip(parents, sent, strict=True)), default=0.0)
        until[partition] = start + partition_to_latency_mapping[partition].overall_latency_sec
    return max(until.values(), default=0.0)
