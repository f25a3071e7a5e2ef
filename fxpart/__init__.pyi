"""The public names and the modules they live in. `__init__.py` imports each on first use."""

from fxpart.capture.batch_dim.analyze import analyze_batch_dims as analyze_batch_dims
from fxpart.capture.models.spec import ModelSpec as ModelSpec
from fxpart.capture.symbolic.api import symbolic_graph as symbolic_graph
from fxpart.capture.symbolic.dims import SymbolicDim as SymbolicDim
from fxpart.capture.training.cut_step import ForwardBackward as ForwardBackward
from fxpart.capture.training.cut_step import cut_step as cut_step
from fxpart.core.assignment import Assignment as Assignment
from fxpart.core.data_parallel import DataParallel as DataParallel
from fxpart.core.data_parallel import split_topology as split_topology
from fxpart.core.efficiency import Efficiency as Efficiency
from fxpart.core.graph import OpGraph as OpGraph
from fxpart.core.graph import without_python as without_python
from fxpart.core.optimizer import Optimizer as Optimizer
from fxpart.core.optimizer import with_optimizer as with_optimizer
from fxpart.core.partitions import partition_by_device as partition_by_device
from fxpart.core.phases import StepOptions as StepOptions
from fxpart.core.reserve import Reserve as Reserve
from fxpart.core.reserve import rounded as rounded
from fxpart.core.reserve import with_reserve as with_reserve
from fxpart.core.saved_assignment import SavedAssignment as SavedAssignment
from fxpart.core.saved_assignment import assignment_for as assignment_for
from fxpart.core.saved_assignment import read_assignment as read_assignment
from fxpart.core.saved_assignment import write_assignment as write_assignment
from fxpart.core.symbolic_graph import SymbolicGraph as SymbolicGraph
from fxpart.core.topology import DeviceSpec as DeviceSpec
from fxpart.core.topology import Link as Link
from fxpart.core.topology import Topology as Topology
from fxpart.core.topology import uniform_topology as uniform_topology
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
from fxpart.cost.problem import Problem as Problem
from fxpart.cost.problem import make_problem as make_problem
from fxpart.cost.profile import OperatorProfile as OperatorProfile
from fxpart.cost.roofline import LatencyModel as LatencyModel
from fxpart.cost.symbolic.formula import MaxFormula as MaxFormula
from fxpart.cost.symbolic.latency import latency_formula as latency_formula
from fxpart.cost.symbolic.limits import largest_batch as largest_batch
from fxpart.cost.symbolic.limits import smallest_memory as smallest_memory
from fxpart.cost.symbolic.peak import cost_formula as cost_formula
from fxpart.cost.symbolic.peak import peak_formulas as peak_formulas
from fxpart.cost.symbolic.sweep import Sums as Sums
from fxpart.cost.symbolic.sweep import SweepTable as SweepTable
from fxpart.cost.symbolic.sweep import sweep as sweep
from fxpart.errors import CacheError as CacheError
from fxpart.errors import CaptureError as CaptureError
from fxpart.errors import CycleError as CycleError
from fxpart.errors import ExecutionError as ExecutionError
from fxpart.errors import FxpartError as FxpartError
from fxpart.errors import InfeasibleError as InfeasibleError
from fxpart.errors import NotApplicableError as NotApplicableError
from fxpart.errors import SpecError as SpecError
from fxpart.execution.local import LocalRun as LocalRun
from fxpart.execution.local import run_local as run_local
from fxpart.execution.pipeline_run import PipelineRun as PipelineRun
from fxpart.execution.pipeline_run import run_pipeline as run_pipeline
from fxpart.execution.profiling.api import profile_operators as profile_operators
from fxpart.execution.real_model import RealModel as RealModel
from fxpart.execution.real_model import real_model as real_model
from fxpart.execution.real_model import real_module as real_module
from fxpart.execution.real_step import StepPeak as StepPeak
from fxpart.execution.real_step import forward_peak_bytes as forward_peak_bytes
from fxpart.execution.real_step import step_peak_bytes as step_peak_bytes
from fxpart.execution.split.placement import split_by_assignment as split_by_assignment
from fxpart.execution.stages.chain import Chain as Chain
from fxpart.execution.stages.chain import StageModule as StageModule
from fxpart.execution.stages.chain import chain_stages as chain_stages
from fxpart.execution.stages.engines import pipeline_stage as pipeline_stage
from fxpart.execution.stages.stage_files import load_stage as load_stage
from fxpart.execution.stages.stage_files import save_stages as save_stages
from fxpart.placement import MODES as MODES
from fxpart.placement import PipelineOptions as PipelineOptions
from fxpart.placement import make_mode as make_mode
from fxpart.plan_export import DeviceMap as DeviceMap
from fxpart.plan_export import device_map as device_map
from fxpart.plan_export import split_points as split_points
from fxpart.schedule import SCHEDULES as SCHEDULES
from fxpart.schedule import PipelineCosts as PipelineCosts
from fxpart.schedule import ScheduleResult as ScheduleResult
from fxpart.schedule import simulate_schedule as simulate_schedule
from fxpart.schedule import stage_costs as stage_costs
from fxpart.schedule import step_on_cores as step_on_cores
from fxpart.torch_compat.batch_dim import BatchDimAnalyzer as BatchDimAnalyzer
from fxpart.torch_compat.memory import MemoryTracker as MemoryTracker
from fxpart.torch_compat.memory import build_memory_profile as build_memory_profile
from fxpart.torch_compat.memory import get_fwd_bwd_interactions as get_fwd_bwd_interactions
from fxpart.torch_compat.memory import get_peak_memory as get_peak_memory
from fxpart.torch_compat.partitioner import DAG as DAG
from fxpart.torch_compat.partitioner import DAGNode as DAGNode
from fxpart.torch_compat.partitioner import Device as Device
from fxpart.torch_compat.partitioner import NodeLatency as NodeLatency
from fxpart.torch_compat.partitioner import Partition as Partition
from fxpart.torch_compat.partitioner import Partitioner as Partitioner
from fxpart.torch_compat.partitioner import PartitionerConfig as PartitionerConfig
from fxpart.torch_compat.partitioner import PartitionLatency as PartitionLatency
from fxpart.torch_compat.partitioner import PartitionMode as PartitionMode
from fxpart.torch_compat.partitioner import PartitionResult as PartitionResult
from fxpart.torch_compat.partitioner import check_dependency as check_dependency
from fxpart.torch_compat.partitioner import combine_two_partitions as combine_two_partitions
from fxpart.torch_compat.partitioner import get_bfs_level_partition as get_bfs_level_partition
from fxpart.torch_compat.partitioner import get_comm_latency_between as get_comm_latency_between
from fxpart.torch_compat.partitioner import get_device_partition_stats as get_device_partition_stats
from fxpart.torch_compat.partitioner import (
    get_device_to_partitions_mapping as get_device_to_partitions_mapping,
)
from fxpart.torch_compat.partitioner import get_extra_size_of as get_extra_size_of
from fxpart.torch_compat.partitioner import (
    get_latency_of_one_partition as get_latency_of_one_partition,
)
from fxpart.torch_compat.partitioner import (
    get_latency_of_partitioned_graph as get_latency_of_partitioned_graph,
)
from fxpart.torch_compat.partitioner import get_logical_id_to_device as get_logical_id_to_device
from fxpart.torch_compat.partitioner import (
    get_node_to_partition_mapping as get_node_to_partition_mapping,
)
from fxpart.torch_compat.partitioner import (
    get_partition_to_latency_mapping as get_partition_to_latency_mapping,
)
from fxpart.torch_compat.partitioner import get_size_of_all_nodes as get_size_of_all_nodes
from fxpart.torch_compat.partitioner import get_size_of_node as get_size_of_node
from fxpart.torch_compat.partitioner import get_tensor_meta as get_tensor_meta
from fxpart.torch_compat.partitioner import reorganize_partitions as reorganize_partitions
from fxpart.torch_compat.partitioner import replace_target_nodes_with as replace_target_nodes_with
from fxpart.torch_compat.partitioner import reset_partition_device as reset_partition_device
from fxpart.torch_compat.partitioner import set_parents_and_children as set_parents_and_children
from fxpart.torch_compat.partitioner import size_bytes as size_bytes
from fxpart.torch_compat.pipeline.build import build_pipeline_model as build_pipeline_model
from fxpart.torch_compat.pipeline.cut_points import (
    generate_pipeline_partition as generate_pipeline_partition,
)
from fxpart.torch_compat.pipeline.liveness import analyze_pipeline_module as analyze_pipeline_module
from fxpart.torch_compat.pipeline.tied_weights import TiedGradient as TiedGradient
from fxpart.torch_compat.pipeline.tied_weights import analyze_tie_weights as analyze_tie_weights
from fxpart.torch_compat.pipeline.tied_weights import tied_gradient_stages as tied_gradient_stages
from fxpart.torch_compat.split_module import split_by_tags as split_by_tags
from fxpart.torch_compat.split_module import split_module as split_module

__all__: list[str]
