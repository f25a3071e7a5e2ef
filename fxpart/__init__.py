"""Cut a PyTorch model over devices, and say whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.modes`) makes an `Assignment` of it;
`evaluate` says what that costs. What needs torch is in `fxpart.capture`, `fxpart.models` and
`fxpart.partitioner`, the replacement of torch's own partitioner under torch's names.

Names are imported when they are first used, so that importing one error class stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpart.assignment import Assignment
    from fxpart.cost.evaluate import evaluate
    from fxpart.cost.evaluation import DeviceUse, Evaluation
    from fxpart.cost.roofline import LatencyModel
    from fxpart.errors import (
        CacheError,
        CaptureError,
        CycleError,
        FxpartError,
        InfeasibleError,
        SpecError,
    )
    from fxpart.graph import OpGraph
    from fxpart.modes import MODES, make_mode
    from fxpart.partitioner import (
        DAG,
        DAGNode,
        Device,
        NodeLatency,
        Partition,
        Partitioner,
        PartitionerConfig,
        PartitionLatency,
        PartitionMode,
        PartitionResult,
        check_dependency,
        get_comm_latency_between,
        get_device_partition_stats,
        get_device_to_partitions_mapping,
        get_extra_size_of,
        get_latency_of_one_partition,
        get_latency_of_partitioned_graph,
        get_partition_to_latency_mapping,
        get_size_of_all_nodes,
        get_size_of_node,
        get_tensor_meta,
        replace_target_nodes_with,
        size_bytes,
    )
    from fxpart.problem import Problem, make_problem
    from fxpart.topology import DeviceSpec, Link, Topology, uniform_topology

__all__ = [
    "DAG",
    "MODES",
    "Assignment",
    "CacheError",
    "CaptureError",
    "CycleError",
    "DAGNode",
    "Device",
    "DeviceSpec",
    "DeviceUse",
    "Evaluation",
    "FxpartError",
    "InfeasibleError",
    "LatencyModel",
    "Link",
    "NodeLatency",
    "OpGraph",
    "Partition",
    "PartitionLatency",
    "PartitionMode",
    "PartitionResult",
    "Partitioner",
    "PartitionerConfig",
    "Problem",
    "SpecError",
    "Topology",
    "check_dependency",
    "evaluate",
    "get_comm_latency_between",
    "get_device_partition_stats",
    "get_device_to_partitions_mapping",
    "get_extra_size_of",
    "get_latency_of_one_partition",
    "get_latency_of_partitioned_graph",
    "get_partition_to_latency_mapping",
    "get_size_of_all_nodes",
    "get_size_of_node",
    "get_tensor_meta",
    "make_mode",
    "make_problem",
    "replace_target_nodes_with",
    "size_bytes",
    "uniform_topology",
]

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
        "get_comm_latency_between",
        "get_device_partition_stats",
        "get_device_to_partitions_mapping",
        "get_extra_size_of",
        "get_latency_of_one_partition",
        "get_latency_of_partitioned_graph",
        "get_partition_to_latency_mapping",
        "get_size_of_all_nodes",
        "get_size_of_node",
        "get_tensor_meta",
        "replace_target_nodes_with",
        "size_bytes",
    ),
    "fxpart.problem": ("Problem", "make_problem"),
    "fxpart.topology": ("DeviceSpec", "Link", "Topology", "uniform_topology"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
