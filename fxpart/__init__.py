"""Cut a PyTorch model over devices, and say whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.modes`) makes an `Assignment` of it;
`evaluate` says what that costs. What needs torch is in `fxpart.capture`, `fxpart.models` and
`fxpart.partitioner`, the replacement of torch's own partitioner under torch's names.

Names are imported when they are first used, so that importing one error class stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Under two names, or a type checker would take them for private; at run time they are not imported.
if TYPE_CHECKING:
    from fxpart.assignment import Assignment as Assignment
    from fxpart.cost.evaluate import evaluate as evaluate
    from fxpart.cost.evaluation import DeviceUse as DeviceUse
    from fxpart.cost.evaluation import Evaluation as Evaluation
    from fxpart.cost.roofline import LatencyModel as LatencyModel
    from fxpart.errors import CacheError as CacheError
    from fxpart.errors import CaptureError as CaptureError
    from fxpart.errors import CycleError as CycleError
    from fxpart.errors import FxpartError as FxpartError
    from fxpart.errors import InfeasibleError as InfeasibleError
    from fxpart.errors import SpecError as SpecError
    from fxpart.graph import OpGraph as OpGraph
    from fxpart.modes import MODES as MODES
    from fxpart.modes import make_mode as make_mode
    from fxpart.partitioner import DAG as DAG
    from fxpart.partitioner import DAGNode as DAGNode
    from fxpart.partitioner import Device as Device
    from fxpart.partitioner import NodeLatency as NodeLatency
    from fxpart.partitioner import Partition as Partition
    from fxpart.partitioner import Partitioner as Partitioner
    from fxpart.partitioner import PartitionerConfig as PartitionerConfig
    from fxpart.partitioner import PartitionLatency as PartitionLatency
    from fxpart.partitioner import PartitionMode as PartitionMode
    from fxpart.partitioner import PartitionResult as PartitionResult
    from fxpart.partitioner import check_dependency as check_dependency
    from fxpart.partitioner import combine_two_partitions as combine_two_partitions
    from fxpart.partitioner import get_bfs_level_partition as get_bfs_level_partition
    from fxpart.partitioner import get_comm_latency_between as get_comm_latency_between
    from fxpart.partitioner import get_device_partition_stats as get_device_partition_stats
    from fxpart.partitioner import (
        get_device_to_partitions_mapping as get_device_to_partitions_mapping,
    )
    from fxpart.partitioner import get_extra_size_of as get_extra_size_of
    from fxpart.partitioner import get_latency_of_one_partition as get_latency_of_one_partition
    from fxpart.partitioner import (
        get_latency_of_partitioned_graph as get_latency_of_partitioned_graph,
    )
    from fxpart.partitioner import get_logical_id_to_device as get_logical_id_to_device
    from fxpart.partitioner import get_node_to_partition_mapping as get_node_to_partition_mapping
    from fxpart.partitioner import (
        get_partition_to_latency_mapping as get_partition_to_latency_mapping,
    )
    from fxpart.partitioner import get_size_of_all_nodes as get_size_of_all_nodes
    from fxpart.partitioner import get_size_of_node as get_size_of_node
    from fxpart.partitioner import get_tensor_meta as get_tensor_meta
    from fxpart.partitioner import reorganize_partitions as reorganize_partitions
    from fxpart.partitioner import replace_target_nodes_with as replace_target_nodes_with
    from fxpart.partitioner import reset_partition_device as reset_partition_device
    from fxpart.partitioner import set_parents_and_children as set_parents_and_children
    from fxpart.partitioner import size_bytes as size_bytes
    from fxpart.problem import Problem as Problem
    from fxpart.problem import make_problem as make_problem
    from fxpart.topology import DeviceSpec as DeviceSpec
    from fxpart.topology import Link as Link
    from fxpart.topology import Topology as Topology
    from fxpart.topology import uniform_topology as uniform_topology

_HOMES = {
    "fxpart.assignment": ("Assignment",),
    "fxpart.cost.evaluate": ("evaluate",),
    "fxpart.cost.evaluation": ("DeviceUse", "Evaluation"),
    "fxpart.cost.roofline": ("LatencyModel",),
    "fxpart.errors": (
        "CacheError",
        "CaptureError",
        "CycleError",
        "FxpartError",
        "InfeasibleError",
        "SpecError",
    ),
    "fxpart.graph": ("OpGraph",),
    "fxpart.modes": ("MODES", "make_mode"),
    "fxpart.partitioner": (
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
    ),
    "fxpart.problem": ("Problem", "make_problem"),
    "fxpart.topology": ("DeviceSpec", "Link", "Topology", "uniform_topology"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
