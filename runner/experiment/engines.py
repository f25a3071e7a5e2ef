"""Launch files of a plan for engines: torchtitan, DeepSpeed, vLLM and others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import split_topology
from fxpart.core.graph import OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.reserve import Interval
from fxpart.core.tensor_groups import tensor_groups
from fxpart.cost.device_memory import CONTEXT, DeviceMemory
from fxpart.errors import SpecError
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.offload.units import STREAMED
from fxpart.plan_export import EngineFiles, EnginePlan, engine_files, stages_of
from fxpart.plan_export.engines import HOSTING, Stages, hosted_stages_of, serves
from runner.config.schema import Config
from runner.experiment.mesh import replica_count
from runner.experiment.serving import generates, is_serving
from runner.experiment.topology import build_topology
from runner.experiment.training import finetunes, is_megatron, is_training
from runner.experiment.weight_format import format_text, has_shipped_format

__all__ = ["block_depth", "engines_note", "files_for_engines"]


def files_for_engines(
    config: Config,
    graph: OpGraph,
    assignment: Assignment,
    *,
    needs: Sequence[DeviceMemory] = (),
    offloaded: Offloaded | None = None,
) -> EngineFiles | None:
    """Return the engine files of a plan; None unless it is a chain of stages of whole layers.

    `needs` is the memory needed on each device, if known, and `offloaded` the plan with tiers.
    """
    if config.model.path is not None or assignment.replicas > 1:
        return None
    # The files cannot express adapters, frozen weights, or weights in two dtypes.
    if finetunes(config) or config.model.autocast:
        return None
    if config.backward_order != "autograd" or config.model.library != "transformers":
        return None
    if offloaded is not None:
        return _hosted_files(config, graph, offloaded)
    try:
        _refuse_cpus(config, assignment)
        stages = stages_of(graph, assignment)
    except SpecError:
        return None
    plan = _engine_plan(config, graph, stages, needs)
    is_one_device = plan.devices == 1 and not is_serving(config)
    return None if is_one_device else engine_files(plan)


def _refuse_cpus(config: Config, assignment: Assignment) -> None:
    """Raise `SpecError` if a device is a CPU: the files are for GPUs."""
    topology = build_topology(config.devices, config.transfer_rate)
    hosts = [device for device, spec in enumerate(topology.devices) if spec.on_host]
    if config.tensor_parallel == 1 and np.isin(assignment.device_of, hosts).any():
        raise SpecError("a device is a CPU")


def _hosted_files(config: Config, graph: OpGraph, offloaded: Offloaded) -> EngineFiles | None:
    """Return the files of a plan with tiers for the engine that computes layers on the host."""
    if offloaded.trains or not serves(config.model.architecture):
        return None
    device_of = offloaded.assignment.device_of
    if offloaded.cache_bytes.any():  # llama.cpp keeps the caches of a layer with its weights
        return None
    try:
        if (offloaded.ways == STREAMED).any():
            raise SpecError("it streams no weights; add offload=host")
        on_host = device_of >= len(offloaded.devices)
        stages = hosted_stages_of(graph, np.where(on_host, -1, device_of))
    except SpecError as error:
        return EngineFiles({}, {HOSTING: str(error)})
    return engine_files(_engine_plan(config, graph, stages, ()))


def _compiled(config: Config) -> Literal["none", "blocks", "blocks and loss", "whole"]:
    if config.runtime.name != "compiled":
        return "none"
    if not config.runtime.regional:
        return "whole"
    return "blocks and loss" if config.runtime.compiled_loss else "blocks"


def _engine_plan(
    config: Config, graph: OpGraph, stages: Stages, needs: Sequence[DeviceMemory]
) -> EnginePlan:
    needed_share, free_share = _memory_shares(needs)
    model, optimizer = config.model, config.optimizer
    tokens = config.context_len if is_serving(config) else None
    if generates(config):
        tokens = (config.prompt_len or 0) + (config.output_len or 0)
    batch_size = model.batch_size // config.data_parallel
    if is_serving(config) and config.schedule.name != "none":
        batch_size *= config.microbatches  # texts whose caches are held at once
    at_once = min(config.prefill_batch or 0, batch_size)
    plan = EnginePlan(
        training=is_training(config),
        stages=stages,
        architecture=model.architecture,
        model=model.config,
        dtype=model.dtype,
        batch_size=batch_size,
        tokens=tokens or model.seq_len,
        prefill_tokens=at_once * (config.prompt_len or 0) or None,
        data_parallel=config.data_parallel,
        zero=config.zero,
        reduce_dtype=config.reduce_dtype,
        tensor_parallel=config.tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        async_tensor_parallel=config.async_tensor_parallel,
        loss_parallel=config.loss_parallel,
        compiled=_compiled(config),
        expert_parallel=config.expert_parallel,
        context_parallel=config.context_parallel,
        schedule=config.schedule.name,
        microbatches=config.microbatches,
        checkpointing=config.checkpointing,
        recomputes_some=bool(config.recomputed_blocks),
        optimizer=optimizer.name,
        implementation=optimizer.implementation,
        same_dtype=not optimizer.master_weights and optimizer.state_dtype in (None, model.dtype),
        megatron=is_megatron(config),
        float8=config.float8.name,
        filter_fqns=tuple(config.float8.filter_fqns),
        weights=config.weights.name,
        activations=config.weights.activations,
        group_size=config.weights.group_size,
        format_text=format_text(config, graph) if config.weights.name != "none" else "",
        has_shipped_format=has_shipped_format(config),
        cache=config.kv_cache,
        needed_share=needed_share,
        free_share=free_share,
        replicas=_replicas(config),
    )
    return replace(plan, machines=_machines(config, plan))


def _machines(config: Config, plan: EnginePlan) -> int:
    """Return the number of machines whose devices the plan uses."""
    pools, nodes = config.devices.pools, config.devices.nodes
    if nodes is None:
        return 1
    node_of = [node for pool, node in zip(pools, nodes, strict=True) for _ in range(pool.count)]
    return len({node_of[device] for device in plan.device_order() or range(plan.devices)})


def _memory_shares(needs: Sequence[DeviceMemory]) -> tuple[float, float]:
    """Return the needed and the free share of an `EnginePlan`."""
    needed, free = 0.0, 1.0
    for need in needs:
        context = need.parts.get(CONTEXT, Interval(0, 0, 0))
        needed = max(needed, (need.needed.expected - context.expected) / need.total_bytes)
        free = min(free, 1 - context.high / need.total_bytes)
    return needed, free


def _replicas(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the devices, or tensor-parallel groups, of each replica."""
    if replica_count(config) == 1:
        return ()
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    groups = tensor_groups(topology, config.tensor_parallel)
    rings = split_topology(groups.topology, replica_count(config)).rings
    return tuple(tuple(ring) for ring in rings.tolist())


def engines_note(
    config: Config,
    graph: OpGraph,
    assignment: Assignment,
    *,
    needs: Sequence[DeviceMemory] = (),
    offloaded: Offloaded | None = None,
) -> str:
    """Return the engine files and the refusing engines' reasons, to append to the carrier line."""
    files = files_for_engines(config, graph, assignment, needs=needs, offloaded=offloaded)
    if files is None:
        return "" if offloaded else _layers_note(config, graph, assignment)
    names = [f"{engine.name} ({engine.file})" for engine in files.texts]
    note = "".join(f", {name}" for name in names)
    if (
        config.phase.name == "inference"
    ):  # plans for inference have other carriers than serving engines
        return note
    reasons = dict.fromkeys(files.refusals.values())
    for reason in reasons:
        refusing = [engine.name for engine, refusal in files.refusals.items() if refusal == reason]
        note += f"; not {' or '.join(refusing)}: {reason}"
    return note


def _layers_note(config: Config, graph: OpGraph, assignment: Assignment) -> str:
    """Return why a pipeline has no engine files, which need stages of whole layers."""
    is_text = (config.model.architecture or "").endswith("ForCausalLM")
    if config.mode.name != "pipeline" or not is_text or config.phase.name == "inference":
        return ""
    if finetunes(config):
        return "; no engine files: no engine's file covers adapters"
    try:
        stages_of(graph, assignment)
    except SpecError as error:
        depth = block_depth(graph)
        remedy = f"; add granularity={depth}" if depth and config.granularity != str(depth) else ""
        return f"; no engine files: {error}{remedy}"
    return ""


def block_depth(graph: OpGraph) -> int:
    """Return the granularity that keeps numbered layers whole; 0 without any."""
    blocks = [block for module in graph.modules if (block := block_of(module))]
    return max((block.count(".") + 1 for block in blocks), default=0)
