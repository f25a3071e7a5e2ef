"""Cut a PyTorch model over devices, and say whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.modes`) makes an `Assignment` of it;
`evaluate` says what that costs, and `fxpart.schedule` what a pipeline over micro-batches does.

What needs torch is in rooms of its own: `fxpart.capture` and `fxpart.models` make graphs;
`fxpart.split` and `fxpart.pipeline` cut a module as it was decided; `fxpart.execution` runs it and
`fxpart.profiling` measures its operators; `fxpart.memory` and `fxpart.batch_dim` follow the bytes
and the batch through graphs of torch; `fxpart.partitioner` replaces torch's own partitioner
under torch's names. `fxpart.leaving` says a plan in the words of other tools.

Names are imported when they are first used, so that importing one error class stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fxpart.lazy_names import HOMES as _HOMES

# Under two names, or a type checker would take them for private; at run time they are not imported.
if TYPE_CHECKING:
    from fxpart.assignment import Assignment as Assignment
    from fxpart.batch_dim import BatchDimAnalyzer as BatchDimAnalyzer
    from fxpart.batch_dim import analyze_batch_dims as analyze_batch_dims
    from fxpart.capture.cut_step import ForwardBackward as ForwardBackward
    from fxpart.capture.cut_step import cut_step as cut_step
    from fxpart.capture.eager_lifetimes import eager_graph as eager_graph
    from fxpart.capture.symbolic import symbolic_graph as symbolic_graph
    from fxpart.cost.all_reduce import AllReduce as AllReduce
    from fxpart.cost.all_reduce import all_reduce_cost as all_reduce_cost
    from fxpart.cost.all_reduce import partial_values as partial_values
    from fxpart.cost.calibration import Calibration as Calibration
    from fxpart.cost.calibration import read_calibration as read_calibration
    from fxpart.cost.calibration import write_calibration as write_calibration
    from fxpart.cost.evaluate import evaluate as evaluate
    from fxpart.cost.evaluation import DeviceUse as DeviceUse
    from fxpart.cost.evaluation import Evaluation as Evaluation
    from fxpart.cost.fit import calibrate as calibrate
    from fxpart.cost.peak_tensors import DevicePeak as DevicePeak
    from fxpart.cost.peak_tensors import LiveTensor as LiveTensor
    from fxpart.cost.peak_tensors import device_peaks as device_peaks
    from fxpart.cost.profile import OperatorProfile as OperatorProfile
    from fxpart.cost.roofline import LatencyModel as LatencyModel
    from fxpart.data_parallel import DataParallel as DataParallel
    from fxpart.data_parallel import split_topology as split_topology
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
    from fxpart.execution.real_step import StepPeak as StepPeak
    from fxpart.execution.real_step import forward_peak_bytes as forward_peak_bytes
    from fxpart.execution.real_step import step_peak_bytes as step_peak_bytes
    from fxpart.graph import OpGraph as OpGraph
    from fxpart.leaving import DeviceMap as DeviceMap
    from fxpart.leaving import device_map as device_map
    from fxpart.leaving import split_points as split_points
    from fxpart.memory import MemoryTracker as MemoryTracker
    from fxpart.memory import build_memory_profile as build_memory_profile
    from fxpart.memory import get_fwd_bwd_interactions as get_fwd_bwd_interactions
    from fxpart.memory import get_peak_memory as get_peak_memory
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
    from fxpart.phases import StepOptions as StepOptions
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
    from fxpart.reserve import Reserve as Reserve
    from fxpart.reserve import rounded as rounded
    from fxpart.reserve import with_reserve as with_reserve
    from fxpart.schedule import SCHEDULES as SCHEDULES
    from fxpart.schedule import ScheduleResult as ScheduleResult
    from fxpart.schedule import simulate_schedule as simulate_schedule
    from fxpart.schedule import stage_costs as stage_costs
    from fxpart.schedule import step_on_cores as step_on_cores
    from fxpart.split import split_by_assignment as split_by_assignment
    from fxpart.split import split_by_tags as split_by_tags
    from fxpart.split import split_module as split_module
    from fxpart.symbolic.cost import cost_formula as cost_formula
    from fxpart.symbolic.formula import MaxFormula as MaxFormula
    from fxpart.symbolic.graph import SymbolicGraph as SymbolicGraph
    from fxpart.symbolic.latency import latency_formula as latency_formula
    from fxpart.symbolic.limits import largest_batch as largest_batch
    from fxpart.symbolic.limits import smallest_memory as smallest_memory
    from fxpart.symbolic.peak import peak_formulas as peak_formulas
    from fxpart.symbolic.sweep import Sums as Sums
    from fxpart.symbolic.sweep import SweepTable as SweepTable
    from fxpart.symbolic.sweep import sweep as sweep
    from fxpart.topology import DeviceSpec as DeviceSpec
    from fxpart.topology import Link as Link
    from fxpart.topology import Topology as Topology
    from fxpart.topology import uniform_topology as uniform_topology
    from fxpart.training.optimizer import Optimizer as Optimizer
    from fxpart.training.optimizer import with_optimizer as with_optimizer

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
