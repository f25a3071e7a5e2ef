"""A drop-in replacement of ``torch.fx.experimental.accelerator_partitioner``.

Names, fields and their order are those of torch, including ``partitioner_utils`` and
``graph_manipulation``. So are the answers of `size_based`, `sparse_nn`, `aot_based` and of a single
device, whenever torch's answer is complete. In `kl_based` and `cost_aware` the placement may
differ; on random graphs its latency is never higher than that of a complete answer by torch.
``docs/differences.md`` lists every difference. Placements are found on arrays, in
`fxpart.torch_compat.accounting`; this package reads graphs and applies the plans.
"""

from fxpart.torch_compat.partitioner.config import (
    Device,
    NodeLatency,
    PartitionerConfig,
    PartitionLatency,
    PartitionMode,
)
from fxpart.torch_compat.partitioner.devices import (
    get_device_partition_stats,
    get_device_to_partitions_mapping,
    get_logical_id_to_device,
)
from fxpart.torch_compat.partitioner.latency import (
    get_comm_latency_between,
    get_latency_of_one_partition,
    get_latency_of_partitioned_graph,
    get_partition_to_latency_mapping,
)
from fxpart.torch_compat.partitioner.node_sizes import (
    get_size_of_all_nodes,
    get_size_of_node,
    get_tensor_meta,
    size_bytes,
)
from fxpart.torch_compat.partitioner.partition import Partition, get_extra_size_of
from fxpart.torch_compat.partitioner.partitioner import (
    DAG,
    DAGNode,
    Partitioner,
    PartitionResult,
)
from fxpart.torch_compat.partitioner.structure import (
    check_dependency,
    combine_two_partitions,
    get_bfs_level_partition,
    get_node_to_partition_mapping,
    reorganize_partitions,
    replace_target_nodes_with,
    reset_partition_device,
    set_parents_and_children,
)

__all__ = [
    "DAG",
    "DAGNode",
    "Device",
    "NodeLatency",
    "Partition",
    "PartitionLatency",
    "PartitionMode",
    "PartitionResult",
    "Partitioner",
    "PartitionerConfig",
    "check_dependency",
    "combine_two_partitions",
    "get_bfs_level_partition",
    "get_comm_latency_between",
    "get_device_partition_stats",
    "get_device_to_partitions_mapping",
    "get_extra_size_of",
    "get_latency_of_one_partition",
    "get_latency_of_partitioned_graph",
    "get_logical_id_to_device",
    "get_node_to_partition_mapping",
    "get_partition_to_latency_mapping",
    "get_size_of_all_nodes",
    "get_size_of_node",
    "get_tensor_meta",
    "reorganize_partitions",
    "replace_target_nodes_with",
    "reset_partition_device",
    "set_parents_and_children",
    "size_bytes",
]
