"""Tensors in host memory or on disk: the request, its placement, and reports on it."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.tiers import DISK, OffloadOptions, Tier, Tiers, tiers_of
from fxpart.core.topology import DeviceSpec
from fxpart.cost.problem import Problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import InfeasibleError, NotApplicableError, SpecError
from fxpart.placement import Place
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.plan import Offloaded, offload
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED
from fxpart.placement.offload.updates import offload_updates
from fxpart.placement.search.fill import place_all
from fxpart.plan_export import DeviceMap, tiered_device_map
from runner.config.device_schema import TierConfig
from runner.config.schema import COMPUTED_TIMES, Config
from runner.experiment.mesh import replica_count, replica_degrees
from runner.experiment.serving import is_serving
from runner.experiment.training import is_training
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = [
    "carried_by",
    "check_offload",
    "configured_tiers",
    "machine_of",
    "offload_document",
    "offload_line",
    "offload_metrics",
    "offloaded_map",
    "placed",
]


def configured_tiers(config: Config) -> Tiers | None:
    """Return the tiers configured next to the devices, if any.

    Each device of a tensor-parallel group has its parts of the weights and caches: the tiers are an
    equal share for each, and the host computes none of them.

    Raises:
        SpecError: if two tiers are of one kind, or a tier has no memory or no link.

    """
    return tiers_of([_tier(tier, config.tensor_parallel) for tier in config.devices.tiers])


def _tier(tier: TierConfig, shares: int) -> Tier:
    processor, memory_bytes, bytes_per_s = None, tier.memory_bytes // shares, tier.bytes_per_s
    if tier.kind == DISK and bytes_per_s is not None:
        bytes_per_s /= shares
    if shares == 1 and tier.flops_per_s and tier.memory_bandwidth_bytes_per_s:
        processor = DeviceSpec(
            name=tier.name,
            memory_bytes=tier.memory_bytes,
            flops_per_s=dict(tier.flops_per_s),
            memory_bandwidth_bytes_per_s=tier.memory_bandwidth_bytes_per_s,
            on_host=True,
            is_tier=True,
        )
    return Tier(tier.name, tier.kind, memory_bytes, bytes_per_s, processor)


def _options(config: Config) -> OffloadOptions:
    """Return the options for one device of each tensor-parallel group."""
    fields = {name: getattr(config.offload, name) for name in OffloadOptions.__slots__}
    options, shares = OffloadOptions(**fields), config.tensor_parallel
    rate, pinned_bytes = options.host_bytes_per_s, options.pinned_bytes
    return replace(
        options,
        host_bytes_per_s=None if rate is None else rate / shares,
        pinned_bytes=None if pinned_bytes is None else pinned_bytes // shares,
    )


def check_offload(config: Config) -> None:
    """Check tiers and offloading, and that the rest of `config` supports them.

    Raises:
        SpecError: if not; the message says what to use.

    """
    options = _options(config)
    tiers = configured_tiers(config)
    if tiers is None:
        if options.name != "auto":
            raise SpecError(
                f"offload={options.name} needs a tier for tensors, but "
                f"devices={config.devices.spec} has none; add one, such as +host64gb, or leave out "
                "offload"
            )
        for name in ("cache", "optimizer", "activations", "weights"):
            if getattr(options, name) == "all":
                raise SpecError(
                    f"offload.{name}=all needs a tier, but devices={config.devices.spec} has none; "
                    "add one, such as +host64gb"
                )
        return
    trains = is_training(config)
    _check_groups(config, options, tiers.host)
    if trains and options.optimizer != "none":
        _check_host_times(config, f"offload.optimizer={options.optimizer} updates", tiers.host)
    elif options.on_host and not options.stream:
        _check_host_times(config, f"offload={options.name} computes", tiers.host)
    _check_amounts(config, options)
    against = {
        "optimizer=none": trains and config.optimizer.name == "none",
        f"engine={config.engine}": trains and config.engine != "torch",
        f"schedule={config.schedule.name}": config.schedule.name != "none",
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        replica_degrees(config): replica_count(config) > 1,
        "devices.saturate_host=true": config.devices.saturate_host,
        "model.path": config.model.path is not None,
        "devices.nodes": len(set(config.devices.nodes or ())) > 1,
    }
    for choice in (name for name, is_set in against.items() if is_set):
        raise NotApplicableError(
            f"tier {tiers.host.name} is supported for weights and caches of a pass or a serving "
            "step, or for optimizer states and activations of a training step, on one machine at "
            f"one size; leave out {choice} or the tier"
        )


def _check_groups(config: Config, options: OffloadOptions, host: Tier) -> None:
    """Raise `NotApplicableError` if a tensor-parallel group would do more than stream its parts."""
    ranks = config.tensor_parallel
    if ranks > 1 and is_training(config):
        raise NotApplicableError(
            f"tier {host.name} is supported for a pass or a serving step of tensor-parallel "
            f"groups, got phase={config.phase.name}; leave out tensor_parallel={ranks} or the tier"
        )
    if ranks > 1 and not options.stream:
        raise NotApplicableError(
            f"offload={options.name} computes modules on the host, which tensor_parallel={ranks} "
            "splits over devices; use offload=prefetch, or leave out tensor_parallel"
        )


def _check_amounts(config: Config, options: OffloadOptions) -> None:
    """Raise `NotApplicableError` if all of a kind that the step lacks is to be offloaded."""
    wrong = {
        "cache": ("a step with a cache", "phase=decode", is_serving(config)),
        "optimizer": ("a training step", "phase=training", is_training(config)),
        "activations": ("a training step", "phase=training", is_training(config)),
        "weights": ("a training step", "phase=training", is_training(config)),
    }
    for name, (step, phase, is_so) in wrong.items():
        if getattr(options, name) == "all" and not is_so:
            raise NotApplicableError(
                f"offload.{name}=all applies to {step}, not to phase={config.phase.name}; add "
                f"{phase}"
            )


def _check_host_times(config: Config, what: str, host: Tier) -> None:
    instead = "offload.optimizer=none" if "optimizer" in what else "offload=prefetch"
    if host.processor is None:
        raise SpecError(
            f"{what} on the host, but tier {host.name} has no flops_per_s and "
            f"memory_bandwidth_bytes_per_s; set them, or use {instead}"
        )
    if not config.latency.is_computed:
        raise NotApplicableError(
            f"{what} on the host, but latency={config.latency.source} has times for one kind of "
            f"device only; use latency={' or '.join(COMPUTED_TIMES)}, or {instead}"
        )


def placed(
    config: Config,
    problem: Problem,
    machine: Machine | None,
    place: Place,
    *,
    everything: bool = False,
) -> tuple[Assignment, Offloaded | None]:
    """Return the placement of a mode, and the tensors in tiers if the devices are too small.

    `machine` is `machine_of` the same `problem`. With `everything`, all possible tensors are put in
    tiers, except in training.

    Raises:
        InfeasibleError: if the model does not fit: there are no tiers, they are full, or tensors
            that must stay on devices are too large.

    """
    if machine is None:
        return place(problem), None
    options = machine.options
    on_host = options.optimizer, options.activations, options.weights
    if is_training(config) and set(on_host[:2]) == {"none"}:
        return place(problem), None
    is_forced = everything or "all" in (options.cache, *on_host)
    if not is_forced and place_all(problem, problem.topology.memory_bytes.tolist()) is not None:
        # A mode that keeps modules whole, or uses one device, may still find no room.
        with suppress(InfeasibleError):
            return place(problem), None
    if is_training(config):
        offloaded = offload_updates(machine, place)
    else:
        offloaded = offload(machine, place, everything=everything)
    return offloaded.assignment, offloaded


def machine_of(
    config: Config, problem: Problem, first: Problem, times: LatencySource
) -> Machine | None:
    """Return the devices of `problem` with their tiers; None without tiers.

    `first` is `problem` with full memory, before earlier attempts reduced it.
    """
    tiers = configured_tiers(config)
    if tiers is None:
        return None
    host_times = times.op_time_s if config.latency.is_computed else None
    link, begins = _link(config, tiers.host), config.phase.name == "prefill"
    return Machine(problem, tiers, _options(config), link, host_times, first, begins=begins)


def _link(config: Config, host: Tier) -> tuple[float, float]:
    """Return the bytes/s and the latency of a device's link to the host.

    Devices connected by PCIe, or by a link slower than the tier's, reach the host over the same
    link; others, such as those with NVLink, over the tier's link.
    """
    rate = config.transfer_rate
    stated_rate = host.bytes_per_s or np.inf
    if rate.name.startswith("pcie") or rate.bytes_per_s <= stated_rate:
        return rate.bytes_per_s, rate.latency_s
    stated = next(tier for tier in config.devices.tiers if tier.name == host.name)
    latency_s = rate.latency_s if stated.latency_s is None else stated.latency_s
    return stated_rate, latency_s


# Reports.


def offload_line(config: Config, offloaded: Offloaded) -> str:
    """Return a line on what lies in which tier, and the cost of copies, of all devices together."""
    parts, ranks = [], config.tensor_parallel
    on_host = "states and updates on the host" if offloaded.trains else "on the host"
    for choice, text in ((STREAMED, "streamed"), (HOSTED, on_host)):
        chosen = offloaded.ways == choice
        if chosen.any():
            size = sum(u.weight_bytes for u, c in zip(offloaded.units, chosen, strict=True) if c)
            names = _names([u.path for u, c in zip(offloaded.units, chosen, strict=True) if c])
            parts.append(f"{text} {format_size(ranks * size)} of {names}")
    if cached := int(offloaded.cache_bytes.sum()):
        units = zip(offloaded.units, offloaded.cache_bytes.tolist(), strict=True)
        names = _names([unit.path for unit, size in units if size])
        parts.append(f"caches {format_size(ranks * cached)} of {names}")
    if offloaded.trains and (gathered := offloaded.gathered_bytes):
        parts.append(f"weights copied block by block, {format_size(ranks * gathered)} a step")
    if offloaded.trains and (saved := offloaded.stored_bytes() - offloaded.frozen_bytes):
        parts.append(f"activations {format_size(ranks * saved)} of {_blocks(offloaded)}")
    if offloaded.copies or offloaded.pushes:
        parts.append(_copies_text(offloaded, ranks))
    if disk := offloaded.stored_bytes(disk=True):
        passing = f", through {format_size(ranks * offloaded.passing_bytes)} of the host's memory"
        parts.append(f"{format_size(ranks * disk)} from the disk{passing}")
    tiers = configured_tiers(config)
    assert tiers is not None
    free_bytes = tiers.host.memory_bytes - offloaded.hosted_bytes - offloaded.beside_bytes
    parts.append(f"{format_size(ranks * free_bytes)} of {tiers.host.name} left")
    latency = config.latency
    if config.offload.on_host and tiers.host.processor and not latency.is_computed:
        parts.append(f"none on the host, because latency={latency.source} has no times for it")
    return ", ".join(parts)


def _copies_text(offloaded: Offloaded, ranks: int) -> str:
    back = sum(push.size_bytes for push in offloaded.pushes if push.to_host)
    returned = f" and {format_size(ranks * back)} back" if back else ""
    copied = f"{format_size(ranks * offloaded.streamed_bytes)} copied to the devices{returned}"
    return f"{copied} for one input, {format_s(offloaded.waited_s)} waited for copies"


def _blocks(offloaded: Offloaded) -> str:
    units = zip(offloaded.units, offloaded.tier_bytes.tolist(), strict=True)
    return _names([unit.path for unit, size in units if size])


def _names(paths: list[str]) -> str:
    """Return module paths in short: ``12 modules in model.layers, lm_head``."""
    of_list: dict[str, list[str]] = {}
    for path in paths:
        block = block_of(path)
        of_list.setdefault(block.rpartition(".")[0] if block else path, []).append(path)
    shown = [
        (inside[0] or "the model itself")
        if len(inside) == 1
        else f"{counted(len(inside), 'module')} in {name}"
        for name, inside in of_list.items()
    ]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def offload_metrics(offloaded: Offloaded, ranks: int) -> dict[str, float]:
    """Return the metrics of tiers by name, summed over `ranks`, the devices of a group."""
    sizes = {
        "streamed_gib": offloaded.streamed_bytes,
        "hosted_gib": offloaded.hosted_bytes,
        "host_memory_gib": offloaded.hosted_bytes + offloaded.beside_bytes,
        "disk_gib": offloaded.stored_bytes(disk=True),
        "pushed_gib": sum(push.size_bytes for push in offloaded.pushes if push.to_host),
        "tier_cache_gib": int(offloaded.cache_bytes.sum()),
    }
    in_gib = {name: ranks * size / GIB for name, size in sizes.items()}
    return in_gib | {"copy_wait_ms": offloaded.waited_s * 1e3}


def offload_document(offloaded: Offloaded) -> dict[str, object]:
    """Return the tier and treatment of each unit, and all copies, as plain values.

    Of tensor-parallel groups they are those of one device of each. For a training step, the bytes
    of a unit are those on the host: of weights, gradients and optimizer states.
    """
    bytes_key = "host_bytes" if offloaded.trains else "weight_bytes"
    choices = np.array(["resident", "streamed", "hosted"])[offloaded.ways].tolist()
    return {
        "units": [
            {
                "module": unit.path,
                "way": choice,
                "tier": _tier_word(choice, int(size), is_on_disk=bool(on_disk)),
                bytes_key: unit.weight_bytes,
                "cache_bytes": int(cached),
            }
            for unit, choice, on_disk, size, cached in zip(
                offloaded.units,
                choices,
                offloaded.on_disk,
                offloaded.tier_bytes,
                offloaded.cache_bytes,
                strict=True,
            )
        ],
        "copies": [
            {
                "module": offloaded.copied[copy.unit],
                "device": copy.device,
                "bytes": copy.size_bytes,
                "from": "disk" if copy.source.from_disk else "host",
            }
            for copy in offloaded.copies
            if copy.size_bytes
        ],
        "pushes": [
            {"device": push.device, "bytes": push.size_bytes, "to_host": push.to_host}
            for push in offloaded.pushes
        ],
    }


def offloaded_map(offloaded: Offloaded, graph: OpGraph) -> DeviceMap:
    """Return the plan as accelerate's `device_map`; `graph` is the captured model.

    Modules that the plan runs on the host are mapped to ``cpu``, although accelerate only stores
    them there. A training step's modules are mapped to their devices.
    """
    device_of = offloaded.assignment.device_of
    on_host = device_of >= len(offloaded.devices)
    if offloaded.trains:
        return tiered_device_map(graph, np.where(on_host, device_of[graph.group], device_of), {})
    tier_of = {
        op: "disk" if on_disk else "cpu"
        for unit, choice, on_disk in zip(
            offloaded.units, offloaded.ways, offloaded.on_disk, strict=True
        )
        if choice != RESIDENT
        for op in unit.ops.tolist()
    }
    tier_of |= dict.fromkeys(np.flatnonzero(on_host).tolist(), "cpu")
    return tiered_device_map(graph, np.where(on_host, -1, device_of), tier_of)


def carried_by(offloaded: Offloaded) -> str:
    """Return the tools for a training step, or for caches in a tier; empty for weights alone."""
    if offloaded.trains:
        return _trained_by(offloaded)
    caches = [unit.cache_bytes for unit in offloaded.units]
    if not offloaded.cache_bytes.any():
        return ""
    if (offloaded.ways != RESIDENT).any():
        return "FlexGen"
    if offloaded.cache_bytes.tolist() == caches:
        return "transformers (cache_implementation=offloaded), FlexGen"
    # Some caches and no weights were faster than weights alone.
    return "FlexGen; add offload.cache=none for accelerate"


def _trained_by(offloaded: Offloaded) -> str:
    """Return the tools that offload the optimizer states and activations of a training step."""
    used = np.unique(offloaded.assignment.device_of)
    n_devices = int((used < len(offloaded.devices)).sum())
    tools = []
    if (offloaded.ways == HOSTED).any():
        if n_devices > 1:
            return (
                f"nothing yet: no engine keeps states on the host for a step on {n_devices} devices"
            )
        tools.append(
            "DeepSpeed (zero_optimization.offload_param and offload_optimizer), torch's fully_shard"
            " with CPUOffloadPolicy"
            if offloaded.gathered_bytes
            else "DeepSpeed (zero_optimization.offload_optimizer), torchao's CPUOffloadOptimizer"
            " with offload_gradients"
        )
    if offloaded.stored_bytes() > offloaded.frozen_bytes:
        tools.append(
            "activations by torchtune (enable_activation_offloading) or"
            " torch.autograd.graph.save_on_cpu"
        )
    return "; ".join(tools)


def _tier_word(choice: str, tier_bytes: int, *, is_on_disk: bool) -> str | None:
    if choice == "resident" and not tier_bytes:
        return None
    return "disk" if is_on_disk else "host"
