"""The tools that can execute a plan, and a plan of whole modules next to that of a search."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.granularity import group_operators
from fxpart.core.graph import OpGraph
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import Place, make_mode
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.offload.units import HOSTED
from fxpart.placement.search.refine import LARGE, latency_of
from fxpart.plan_export import Carriers, carriers, map_carriers
from fxpart.sharding.extra_plans import EXTRA_PLANS
from runner.config.schema import Config
from runner.experiment.degrees import devices_of_a_head
from runner.experiment.engines import block_depth, engines_note
from runner.experiment.mesh import replica_count, shares_something
from runner.experiment.offload import carried_by, offloaded_map
from runner.experiment.serving import absorbs
from runner.experiment.topology import cpu_devices
from runner.experiment.training import (
    backward_engine,
    is_megatron,
    is_training,
    left_out_here,
)
from runner.experiment.zero import in_stages
from runner.output.terminal import counted
from runner.output.units import format_s

__all__ = [
    "SEARCHES",
    "WholeModules",
    "carrier_line",
    "tiered_line",
    "whole_line",
    "whole_metrics",
    "whole_modules",
]

SEARCHES = ("kl_based", "cost_aware", "optimal")
"""Modes that may place any operator anywhere."""
_DEARER = 0.2
"""The `mode.boundary_gain` to try if the default finds no cut at modules."""
_NO_ENCODER = "the encoder, which accelerate needs too, is no part of a decode's plan"
_ON_ONE_DEVICE = "plain PyTorch, everything is on one device"
_REPLICAS = "DistributedDataParallel"
_MOST_GROUPS = 256
"""Most groups of operators at which a depth is searched, in some tenths of a second."""


@dataclass(frozen=True, slots=True)
class WholeModules:
    """The best plan found that keeps the modules at some depth of the module tree whole."""

    granularity: str
    """The granularity that finds it; ``operator`` if the overall best plan divides no module."""
    latency_s: float
    more: float
    """Relative increase of latency over the unrestricted plan."""
    carriers: Carriers


def whole_modules(
    config: Config, problem: Problem, assignment: Assignment, place: Place
) -> WholeModules | None:
    """Return the fastest plan of whole modules that the same search finds, if any.

    Depths of the module tree are searched from the outermost inwards, until accelerate could no
    longer run the plan. This takes a tenth of the time of the operator search, which has far more
    candidates. `optimal` would spend all of its steps at each depth, so `kl_based` takes its place.
    There is none with ``runtime=compiled``, where each depth has its own kernels.
    """
    if config.runtime.name == "compiled":
        return None
    applies = config.mode.name in SEARCHES and config.granularity == "operator"
    if not applies or config.objective != "latency" or config.model.path is not None:
        return None
    if assignment.replicas > 1 or replica_count(config) > 1:
        return None
    if config.tensor_parallel > 1:  # the tools that run such plans need stages
        return None
    graph = problem.graph
    best_s, hosts = latency_of(problem, assignment.device_of), cpu_devices(config, problem.topology)
    carried = carriers(graph, assignment, hosts)
    if carried.accelerate and not carried.elsewhere:
        return WholeModules("operator", best_s, 0.0, carried)
    place = make_mode("kl_based") if config.mode.name == "optimal" else place
    best: WholeModules | None = None
    for depth, grouped in _depths(problem):
        try:
            placed = place(replace(problem, graph=grouped))
        except InfeasibleError:
            continue
        carried = carriers(graph, placed, hosts)
        if not carried.accelerate and best is not None:
            break
        latency_s = latency_of(problem, placed.device_of)
        is_first_to_run = carried.accelerate and not (best and best.carriers.accelerate)
        if best is None or is_first_to_run or latency_s < best.latency_s:
            best = WholeModules(depth, latency_s, latency_s / best_s - 1.0, carried)
        if graph.n_ops > LARGE:
            break
    return best


def _depths(problem: Problem) -> Iterator[tuple[str, OpGraph]]:
    """Yield the depths at which modules can be kept whole, with the graph grouped by them."""
    graph, largest = problem.graph, int(problem.topology.memory_bytes.max())
    previous_groups = 1
    for depth in range(1, max(module.count(".") for module in graph.modules) + 2):
        grouped = group_operators(graph, depth)
        groups = len(np.unique(grouped.group))
        if groups > _MOST_GROUPS:
            return
        if groups > previous_groups and _heaviest_bytes(problem, grouped) <= largest:
            yield str(depth), grouped
        previous_groups = groups


def _heaviest_bytes(problem: Problem, grouped: OpGraph) -> int:
    """Return the largest weight bytes of a group; weights shared by groups count in each."""
    weights = np.zeros(grouped.n_ops)
    of_use = grouped.group[grouped.users]
    once = np.unique(np.stack([of_use, grouped.uses]), axis=1)
    np.add.at(weights, once[0], problem.memory.weight_bytes[once[1]])
    return int(weights.max())


def whole_metrics(whole: WholeModules) -> dict[str, float]:
    """Return the metrics of a plan of whole modules by name."""
    return {"whole_modules_ms": whole.latency_s * 1e3, "whole_modules_pct": whole.more * 100}


def carrier_line(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    whole: WholeModules | None,
    needs: Sequence[DeviceMemory] = (),
) -> str:
    """Return the tools that can execute the plan, and what to change if few can.

    `whole` is the plan of whole modules, if one was searched for, and `needs` the memory needed on
    each device.
    """
    note = engines_note(config, problem.graph, assignment, needs=needs)
    own_plan = config.tensor_parallel > 1 and config.model.architecture in EXTRA_PLANS
    if is_megatron(config) or absorbs(config) or devices_of_a_head(config) > 1 or own_plan:
        # Modules of torch do not run its step.
        return note.removeprefix(", ").removeprefix("; ") or "nothing yet"
    return _torch_line(config, problem, assignment, whole) + note


def tiered_line(config: Config, offloaded: Offloaded, graph: OpGraph) -> str:
    """Return the tools that can execute a plan with tiers, and what to change if none can.

    `graph` is the captured model.
    """
    if others := carried_by(offloaded):
        return others
    if absorbs(config):
        return "nothing yet: no engine known here streams weights and absorbs latents"
    if config.tensor_parallel > 1:
        return "nothing yet: no engine known here streams the parts of a tensor-parallel group"
    engines = engines_note(config, graph, offloaded.assignment, offloaded=offloaded)
    mapped = offloaded_map(offloaded, graph)
    carried = map_carriers(graph, mapped)
    if not carried.accelerate:
        advice = _tiered_advice(config, carried, graph, mapped.main_device)
        if engines.startswith(", "):
            return f"{engines.removeprefix(', ')}; {advice}"
        return f"nothing yet; {advice}{engines}"
    copied = "copies a module and waits"
    if (offloaded.ways == HOSTED).any():
        copied = f"copies modules planned on the host to device {mapped.main_device} too"
    elsewhere = ""
    if carried.elsewhere:
        elsewhere = f"; {counted(carried.elsewhere, 'operator')} elsewhere than planned"
    return f"accelerate (device_map.json with cpu and disk, which {copied}{elsewhere}){engines}"


def _tiered_advice(config: Config, carried: Carriers, graph: OpGraph, main: object) -> str:
    """Return why accelerate cannot execute a plan with tiers, and what to change."""
    if not carried.has_all:
        return _NO_ENCODER
    if not carried.torn:
        elsewhere = counted(carried.elsewhere, "operator")
        return (
            f"accelerate would run {elsewhere} elsewhere than planned, since it copies modules to"
            f" device {main} only"
        )
    reason = _cut_through(carried)
    depth = block_depth(graph) or "module"
    if config.granularity == str(depth):
        return reason
    return f"{reason}; add granularity={depth} for accelerate"


def _cut_through(carried: Carriers) -> str:
    be = "is" if len(carried.torn) == 1 else "are"
    return f"{counted(len(carried.torn), 'module')} {be} cut through"


def _torch_line(
    config: Config, problem: Problem, assignment: Assignment, whole: WholeModules | None
) -> str:
    if config.model.path is not None:
        return "nothing: it is a published problem, not a model"
    if config.zero or config.tensor_parallel > 1 or shares_something(config):
        cut = "; whether the cut inside a replica runs is not checked"
        unchecked = cut if assignment.n_partitions > 1 else ""
        return f"{_sharded_by(config)}{unchecked}"
    local = _runs_here(config)
    if assignment.replicas > 1:
        made = f"mode={config.mode.name} makes them"
        if config.devices.saturate_host:
            made = "leave out devices.saturate_host=true"
        return f"nothing yet: inputs take turns on replicas; {made}"
    if assignment.n_partitions == 1 and config.backward_order == "autograd":
        has_replicas = is_training(config) and config.data_parallel > 1
        tool = f"torch's {_REPLICAS}" if has_replicas else _ON_ONE_DEVICE
        return ", ".join([tool, *local])
    if engine := backward_engine(config.backward_order):
        return ", ".join([*local, engine])
    carried = carriers(problem.graph, assignment, cpu_devices(config, problem.topology))
    one_forward = not is_training(config) and config.schedule.name == "none"
    tools = [f"accelerate{_elsewhere(carried)}"] if carried.accelerate and one_forward else []
    if carried.pipelining:
        tools.append("torch pipelining (split_points.json)")
    line = ", ".join([*tools, *local]) or "nothing yet"
    return line if tools else f"{line}; {_advice(config, problem, carried, whole)}"


def _sharded_by(config: Config) -> str:
    """Return the features of torch and transformers that split or shard a step as planned."""
    engines = []
    if config.tensor_parallel > 1:
        norms = " and SequenceParallel for its norms" if config.sequence_parallel else ""
        loss = " with loss_parallel" if config.loss_parallel else ""
        engines.append(f"parallelize_module by the plan of the model's class{norms}{loss}")
    if config.zero == 1:
        engines.append(f"{_REPLICAS} with ZeroRedundancyOptimizer")
    if config.zero > 1:
        whole = "each stage of a pipeline" if in_stages(config) else "the model"
        reduced = config.reduce_dtype
        policy = f" with MixedPrecisionPolicy(reduce_dtype=torch.{reduced})" if reduced else ""
        blocks = f"fully_shard on each numbered block and on {whole}{policy}"
        engines.append(f"{blocks}{_unchecked(config)}")
    if config.context_parallel > 1:
        engines.append("context_parallel, which is experimental")
    carriers_of_all = [f"torch's {', '.join(engines)}"] if engines else []
    if config.expert_parallel > 1:
        sizes = f"tp_size={config.tensor_parallel}, " if config.tensor_parallel > 1 else ""
        sizes += f"ep_size={config.expert_parallel}"
        carriers_of_all.append(f"transformers' DistributedConfig({sizes})")
    return ", ".join(carriers_of_all)


def _unchecked(config: Config) -> str:
    name = config.weights.name
    return f" (not checked with tensors of {name}, scales included)" if name != "none" else ""


def _runs_here(config: Config) -> list[str]:
    """Return the ``execute`` setting by which the runner can execute the plan here, if any."""
    if config.execute.name != "none":
        return [f"execute={config.execute.name}"]
    if config.runtime.name == "compiled":
        return []  # its kernels are only predicted
    if config.phase.name == "generate" or config.finetune.name != "none":
        return []  # only single steps are run, and all weights are trained
    plannable = config.capture.level == "operator" and config.capture.symbolic == "none"
    if config.weights.name != "none" or config.kv_cache != "auto":
        return []  # random weights have the model's dtype
    if not plannable or replica_count(config) > 1 or config.schedule.name == "interleaved":
        return []
    execute = "local" if config.schedule.name == "none" else "pipeline"
    without = left_out_here(config) if is_training(config) else ""
    return [f"execute={execute}" + (f" (add {without})" if without else "")]


def _elsewhere(carried: Carriers) -> str:
    if not carried.elsewhere:
        return " (device_map.json)"
    elsewhere = counted(carried.elsewhere, "operator")
    return f" (device_map.json; {elsewhere} elsewhere than planned)"


def _advice(config: Config, problem: Problem, carried: Carriers, whole: WholeModules | None) -> str:
    """Return why no tool can execute the plan, and what to change."""
    if config.mode.name == "pipeline" and carried.inside:
        reason = f"a stage begins inside {carried.inside}"
        gain = config.mode.options.get("boundary_gain") or 0.0
        if isinstance(gain, float | int) and gain < _DEARER:
            options = {**config.mode.options, "boundary_gain": _DEARER}
            with suppress(InfeasibleError):  # cuts at modules may need more memory
                dearer = make_mode("pipeline", options)(problem)
                if not carriers(problem.graph, dearer).inside:
                    reason += f"; mode.boundary_gain={_DEARER} finds cuts at modules"
        return reason
    if not carried.has_all:
        return _NO_ENCODER
    if is_training(config) or config.schedule.name != "none":
        reason = "torch pipelining runs stages in the model's order"
        return reason if config.mode.name == "pipeline" else f"{reason}; add mode=pipeline"
    elsewhere = counted(carried.elsewhere, "operator")
    reason = f"accelerate would run {elsewhere} elsewhere than planned"
    if carried.torn:
        reason = _cut_through(carried)
    if whole is not None:
        depth = whole.granularity if whole.carriers.accelerate else ""
        return f"{reason}; add granularity={depth} for accelerate" if depth else reason
    depth = next((depth for depth, _ in _depths(problem)), "")
    if not depth or config.granularity != "operator":
        return reason
    return f"{reason}; granularity={depth} keeps modules whole, where they fit"


def whole_line(whole: WholeModules) -> str:
    """Return a line on the cost of keeping modules whole."""
    if whole.granularity == "operator":
        return "this plan divides no module"
    return (
        f"{format_s(whole.latency_s)} ({whole.more:+.1%}) with modules whole,"
        f" by granularity={whole.granularity}"
    )
