"""Cut a PyTorch model over devices, and say whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.modes`) makes an `Assignment` of it;
`evaluate` says what that costs, and `fxpart.schedule` what a pipeline over micro-batches does.

What needs torch is in rooms of its own: `fxpart.capture` and `fxpart.models` make graphs;
`fxpart.split` and `fxpart.pipeline` cut a module as it was decided; `fxpart.execution` runs it and
`fxpart.profiling` measures its operators; `fxpart.partitioner` replaces torch's own partitioner
under torch's names. `fxpart.leaving` says a plan in the words of other tools.

Names are imported when they are first used, so that importing one error class stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Under two names, or a type checker would take them for private; at run time they are not imported.
if TYPE_CHECKING:
    from fxpart.assignment import Assignment as Assignment
    from fxpart.cost.calibration import Calibration as Calibration
    from fxpart.cost.calibration import read_calibration as read_calibration
    from fxpart.cost.calibration import write_calibration as write_calibration
    from fxpart.cost.evaluate import evaluate as evaluate
    from fxpart.cost.evaluation import DeviceUse as DeviceUse
    from fxpart.cost.evaluation import Evaluation as Evaluation
    from fxpart.cost.fit import calibrate as calibrate
    from fxpart.cost.profile import OperatorProfile as OperatorProfile
    from fxpart.cost.roofline import LatencyModel as LatencyModel
    from fxpart.errors import CacheError as CacheError
    from fxpart.errors import CaptureError as CaptureError
    from fxpart.errors import CycleError as CycleError
    from fxpart.errors import ExecutionError as ExecutionError
    from fxpart.errors import FxpartError as FxpartError
    from fxpart.errors import InfeasibleError as InfeasibleError
    from fxpart.errors import SpecError as SpecError
    from fxpart.execution.local import LocalRun as LocalRun
    from fxpart.execution.local import run_local as run_local
    from fxpart.execution.pipeline_run import PipelineRun as PipelineRun
    from fxpart.execution.pipeline_run import run_pipeline as run_pipeline
    from fxpart.execution.real_model import RealModel as RealModel
    from fxpart.execution.real_model import real_model as real_model
    from fxpart.graph import OpGraph as OpGraph
    from fxpart.leaving import DeviceMap as DeviceMap
    from fxpart.leaving import device_map as device_map
    from fxpart.leaving import split_points as split_points
    from fxpart.modes import MODES as MODES
    from fxpart.modes import PipelineOptions as PipelineOptions
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
    from fxpart.pipeline.build import build_pipeline_model as build_pipeline_model
    from fxpart.pipeline.chain import Chain as Chain
    from fxpart.pipeline.chain import StageModule as StageModule
    from fxpart.pipeline.chain import chain_stages as chain_stages
    from fxpart.pipeline.cut_points import (
        generate_pipeline_partition as generate_pipeline_partition,
    )
    from fxpart.pipeline.engines import pipeline_stage as pipeline_stage
    from fxpart.pipeline.liveness import analyze_pipeline_module as analyze_pipeline_module
    from fxpart.pipeline.stage_files import load_stage as load_stage
    from fxpart.pipeline.stage_files import save_stages as save_stages
    from fxpart.pipeline.tied_weights import TiedGradient as TiedGradient
    from fxpart.pipeline.tied_weights import analyze_tie_weights as analyze_tie_weights
    from fxpart.pipeline.tied_weights import tied_gradient_stages as tied_gradient_stages
    from fxpart.problem import Problem as Problem
    from fxpart.problem import make_problem as make_problem
    from fxpart.profiling import profile_operators as profile_operators
    from fxpart.schedule import SCHEDULES as SCHEDULES
    from fxpart.schedule import ScheduleResult as ScheduleResult
    from fxpart.schedule import simulate_schedule as simulate_schedule
    from fxpart.schedule import stage_costs as stage_costs
    from fxpart.schedule import step_on_cores as step_on_cores
    from fxpart.split import split_by_assignment as split_by_assignment
    from fxpart.split import split_by_tags as split_by_tags
    from fxpart.split import split_module as split_module
    from fxpart.topology import DeviceSpec as DeviceSpec
    from fxpart.topology import Link as Link
    from fxpart.topology import Topology as Topology
    from fxpart.topology import uniform_topology as uniform_topology

_HOMES = {
    "fxpart.assignment": ("Assignment",),
    "fxpart.cost.calibration": (
        "Calibration",
        "read_calibration",
        "write_calibration",
    ),
    "fxpart.cost.evaluate": ("evaluate",),
    "fxpart.cost.evaluation": (
        "DeviceUse",
        "Evaluation",
    ),
    "fxpart.cost.fit": ("calibrate",),
    "fxpart.cost.profile": ("OperatorProfile",),
    "fxpart.cost.roofline": ("LatencyModel",),
    "fxpart.errors": (
        "CacheError",
        "CaptureError",
        "CycleError",
        "ExecutionError",
        "FxpartError",
        "InfeasibleError",
        "SpecError",
    ),
    "fxpart.execution.local": (
        "LocalRun",
        "run_local",
    ),
    "fxpart.execution.pipeline_run": (
        "PipelineRun",
        "run_pipeline",
    ),
    "fxpart.execution.real_model": (
        "RealModel",
        "real_model",
    ),
    "fxpart.graph": ("OpGraph",),
    "fxpart.leaving": (
        "DeviceMap",
        "device_map",
        "split_points",
    ),
    "fxpart.modes": (
        "MODES",
        "make_mode",
        "PipelineOptions",
    ),
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
    "fxpart.pipeline.build": ("build_pipeline_model",),
    "fxpart.pipeline.chain": (
        "Chain",
        "StageModule",
        "chain_stages",
    ),
    "fxpart.pipeline.cut_points": ("generate_pipeline_partition",),
    "fxpart.pipeline.engines": ("pipeline_stage",),
    "fxpart.pipeline.liveness": ("analyze_pipeline_module",),
    "fxpart.pipeline.stage_files": (
        "load_stage",
        "save_stages",
    ),
    "fxpart.pipeline.tied_weights": (
        "TiedGradient",
        "analyze_tie_weights",
        "tied_gradient_stages",
    ),
    "fxpart.problem": (
        "Problem",
        "make_problem",
    ),
    "fxpart.profiling": ("profile_operators",),
    "fxpart.schedule": (
        "SCHEDULES",
        "ScheduleResult",
        "simulate_schedule",
        "stage_costs",
        "step_on_cores",
    ),
    "fxpart.split": (
        "split_by_assignment",
        "split_by_tags",
        "split_module",
    ),
    "fxpart.topology": (
        "DeviceSpec",
        "Link",
        "Topology",
        "uniform_topology",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
