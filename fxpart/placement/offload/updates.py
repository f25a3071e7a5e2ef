"""Offloading of optimizer state and weight updates to the host, as in ZeRO-Offload.

The gradients of a block are pushed to the host while the backward continues; a device can buffer
those of two blocks. The host updates its own copy of the weights, in the order of the step's
updates, and each block is pushed back when done. Saved activations may be offloaded too, and so may
the weights themselves, which are then copied to a device block by block.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.partitions import partition_by_device
from fxpart.core.tiers import Tiers
from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Push, Source, with_streams
from fxpart.cost.tables import memory_tables
from fxpart.errors import InfeasibleError, SpecError, show_bytes
from fxpart.placement.infeasible import describe_devices, describe_reserve
from fxpart.placement.offload.activations import Saved, moved, saved_values
from fxpart.placement.offload.copies import sources_of, streams_of
from fxpart.placement.offload.gathered_weights import gathered_copies
from fxpart.placement.offload.hosted_step import BUFFERS, HostedStep, searched_step, without_saved
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.plan import Offloaded, Place, less_stored
from fxpart.placement.offload.units import HOSTED, RESIDENT, Unit, weight_uses
from fxpart.placement.search.fill import place_all

__all__ = ["offload_updates"]


def offload_updates(machine: Machine, place: Place) -> Offloaded:
    """Return a plan of a training step with as little optimizer state on the host as possible.

    The state of the last blocks is offloaded first, as their gradients are available first. Saved
    activations follow if state is not enough.

    Raises:
        InfeasibleError: if the host has too little memory for them, or the devices for the rest.
        SpecError: if state may be offloaded to a host without known operator times.

    """
    graph, options = machine.problem.graph, machine.options
    host = machine.tiers.host
    if options.optimizer != "none" and (host.processor is None or machine.host_times is None):
        missing = "times of its operators" if host.processor else "processor"
        raise SpecError(
            f"offload.optimizer={options.optimizer} updates weights on the host, but {host.name} "
            f"has no {missing}; add that, or use offload.optimizer=none"
        )
    units = _with_frozen(graph, _update_units(graph))
    # Weights on the host are updated there.
    weights = "none" if options.optimizer == "none" else options.weights
    refused: list[InfeasibleError] = []
    for gathers, saves in product(_tried(weights), _tried(options.activations)):
        # A mode may need more offloading than plain filling of devices.
        fewest, all_units = _least_count(machine, units, saves=saves, gathers=gathers)
        for count in sorted({fewest, (fewest + all_units) // 2, all_units}):
            try:
                return _finished(machine, HostedStep(graph, units, count, saves, gathers), place)
            except InfeasibleError as error:
                refused.append(error)
    # Report the host's smallest shortage, which is with the least on the host.
    of_host = [error for error in refused if isinstance(error, _FullHostError)]
    raise min(of_host, key=lambda error: error.needed_bytes or 0) if of_host else refused[-1]


class _FullHostError(InfeasibleError):
    """The host has too little memory for what the devices cannot hold."""


def _tried(amount: str) -> tuple[bool, ...]:
    """Return whether to offload, as the values to try in order."""
    return {"none": (False,), "all": (True,)}.get(amount, (False, True))


def _least_count(
    machine: Machine, units: tuple[Unit, ...], *, saves: bool, gathers: bool
) -> tuple[int, int]:
    """Return the smallest and largest number of units that may be updated on the host."""

    def fits(count: int) -> bool:
        searched = searched_step(machine, HostedStep(machine.problem.graph, units, count, saves))
        return place_all(searched, searched.topology.memory_bytes.tolist()) is not None

    updated = sum(len(unit.ops) > 0 for unit in units)
    if gathers:
        return updated, updated
    if machine.options.optimizer != "auto":
        return (0, 0) if machine.options.optimizer == "none" else (updated, updated)
    return bisect_left(range(updated), True, key=fits), updated


def _update_units(graph: OpGraph) -> tuple[Unit, ...]:
    """Return the blocks with updated weights, in the order of their first gradient."""
    ops: dict[str, list[int]] = defaultdict(list)
    for op in np.flatnonzero(graph.is_update).tolist():
        ops[block_of(graph.modules[op]) or graph.modules[op]].append(op)
    maker = graph.value_producer[graph.gradient_values]
    sizes = np.zeros(len(graph.weight_names), dtype=np.int64)
    np.add.at(sizes, graph.gradient_weights, graph.value_bytes[graph.gradient_values])
    sizes += graph.weight_bytes + graph.weight_state_bytes
    first: dict[int, int] = {}
    for weight, op in zip(graph.gradient_weights.tolist(), maker.tolist(), strict=True):
        first[weight] = min(op, first.get(weight, op))
    first_gradient, units = {}, []
    for path, updates in ops.items():
        weights = np.unique(np.concatenate([graph.uses_of(op) for op in updates]))
        largest = int(sizes[weights].max())
        unit = Unit(path, weights, np.array(updates), int(sizes[weights].sum()), largest)
        first_gradient[path] = min(first[weight] for weight in weights.tolist())
        units.append(unit)
    return tuple(sorted(units, key=lambda unit: first_gradient[unit.path]))


def _with_frozen(graph: OpGraph, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return the units, followed by those without updates: saving blocks and frozen weights."""
    known, none = {unit.path for unit in units}, np.zeros(0, dtype=np.int64)
    blocks = saved_values(graph, np.zeros(graph.n_ops, dtype=np.int64))
    users, _ = weight_uses(graph)
    modules = (graph.modules[op] for op in users.tolist())
    paths = dict.fromkeys([block.path for block in blocks])
    paths |= dict.fromkeys(block_of(module) or module for module in modules)
    return (*units, *(Unit(path, none, none, 0, 0) for path in paths if path not in known))


def _placed(
    machine: Machine, step: HostedStep, place: Place
) -> tuple[Problem, IntArray, Sequence[Saved]]:
    """Return the problem with the host, the mode's placement, and its saved activations."""
    searched = searched_step(machine, step)
    if place_all(searched, searched.topology.memory_bytes.tolist()) is None:
        raise _does_not_fit(machine, searched, step)
    device_of = place(searched).device_of.copy()
    device_of[step.ops] = machine.problem.topology.n_devices
    graph = step.split()
    group = graph.group.copy()
    group[step.ops] = step.ops
    graph = replace(graph, group=group)
    blocks = saved_values(graph, device_of) if step.saves else []
    graph = without_saved(graph, blocks)
    wide = replace(
        machine, problem=replace(machine.problem, graph=graph, memory=memory_tables(graph))
    )
    return wide.with_host, device_of, blocks


def _finished(machine: Machine, step: HostedStep, place: Place) -> Offloaded:
    """Return the plan with the mode's own placement."""
    n_devices = machine.problem.topology.n_devices
    final, device_of, blocks = _placed(machine, step, place)
    graph = final.graph
    change = np.empty(graph.n_ops + 1, dtype=np.int64)
    hosted_bytes = int(peak_on_device(final.memory, device_of, n_devices, change))
    saved = _saved_bytes(step.units, blocks)
    _check_host(machine.tiers, hosted_bytes + int(step.frozen_bytes.sum()), int(saved.sum()))
    sources = _sources(machine, step, int(saved.sum()))
    pushes = _pushes(step, device_of, sources)
    copies, saves = moved(blocks, sources[-1])
    pushes = saves + pushes
    copied = tuple(block.path for block in blocks)
    if step.gathers:
        weights = gathered_copies(step.graph, step.gathered, device_of, sources)
        copies += [replace(copy, unit=len(blocks) + copy.unit) for copy in weights]
        copies.sort(key=lambda copy: copy.first_op)
        copied += tuple(unit.path for unit in step.units)
    assignment = partition_by_device(graph, device_of)
    evaluation = with_streams(
        final,
        assignment,
        copies,
        streams_of(machine, n_devices + 1),
        pushes=pushes,
        bound_s=lower_bound_s(final),
        least_load_s=load_bound_s(final),
    )
    latency_without_copies_s, _ = schedule(final.costs, device_of, schedule_log(final.costs))
    ways = np.full(len(step.units), RESIDENT, dtype=np.int64)
    ways[: step.count] = HOSTED
    offloaded = Offloaded(
        final,
        assignment,
        evaluation,
        step.units,
        ways,
        np.zeros(len(step.units), dtype=np.bool_),
        tuple(copies),
        copied,
        evaluation.latency_s - float(latency_without_copies_s),
        hosted_bytes,
        machine.problem.topology.devices,
        saved + step.frozen_bytes,
        np.zeros_like(saved),
        tuple(pushes),
        frozen_bytes=int(step.frozen_bytes.sum()),
    )
    return replace(offloaded, evaluation=less_stored(evaluation, offloaded))


def _check_host(tiers: Tiers, held_bytes: int, saved_bytes: int) -> None:
    """Refuse states and saved activations that exceed the host's memory."""
    host, disk = tiers.host, tiers.disk
    total = held_bytes + saved_bytes
    if total > host.memory_bytes:
        raise _FullHostError(
            f"optimizer states, with their weights and gradients {show_bytes(held_bytes)}, and"
            f" activations of {show_bytes(saved_bytes)} do not fit {host.name}, which has"
            f" {show_bytes(host.memory_bytes)}"
            + (f", and a training step stores nothing on {disk.name}" if disk else "")
            + "; give more host memory or more devices",
            needed_bytes=total,
            available_bytes=host.memory_bytes,
        )


def _does_not_fit(machine: Machine, searched: Problem, step: HostedStep) -> InfeasibleError:
    n, devices = searched.graph.n_ops, machine.problem.topology.devices
    memory = [device.memory_bytes for device in devices]
    one_device, change = np.zeros(n, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    used = int(peak_on_device(searched.memory, one_device, 0, change))
    offloaded = f"states of {step.count} modules" + (" and saved activations" if step.saves else "")
    offloaded += " and weights" if step.gathers else ""
    return InfeasibleError(
        f"with {offloaded} on the host, tensors of {show_bytes(used)} do not fit the devices,"
        f" {describe_devices(memory)}{describe_reserve(devices)}"
        + (", less room for the saved activations of two blocks" if step.saves else "")
        + "; take larger devices, a smaller batch, or checkpointing=block",
        needed_bytes=used,
        available_bytes=sum(memory),
    )


def _saved_bytes(units: Sequence[Unit], blocks: Sequence[Saved]) -> IntArray:
    """Return the bytes of each unit's saved activations on the host."""
    place = {unit.path: index for index, unit in enumerate(units)}
    sizes = np.zeros(len(units), dtype=np.int64)
    copies, _ = moved(blocks, Source())
    for copy in copies:
        sizes[place[blocks[copy.unit].path]] += copy.size_bytes
    return sizes


def _sources(machine: Machine, step: HostedStep, saved_bytes: int) -> list[Source]:
    """Return the locations of each unit's tensors on the host, then of saved activations."""
    weight_bytes = [
        unit.weight_bytes if index < step.count else 0 for index, unit in enumerate(step.units)
    ]
    sizes = np.array([*(step.frozen_bytes + weight_bytes), saved_bytes], dtype=np.int64)
    return sources_of(machine, sizes, np.zeros(len(sizes), dtype=np.bool_))


def _pushes(step: HostedStep, device_of: IntArray, sources: Sequence[Source]) -> list[Push]:
    """Return the pushes of gradients to the host, then those of updated weights back."""
    graph = step.graph
    up, down = [], []
    for index, unit in enumerate(step.hosted):
        gradients, later = step.gradients(unit), step.first_op(index + BUFFERS)
        waiting_ops = (*unit.ops.tolist(), *(() if later is None else (later,)))
        makers = np.maximum(graph.value_producer[gradients], 0)
        for device in np.unique(device_of[makers]).tolist():
            on_device: BoolArray = device_of[makers] == device
            size = int(graph.value_bytes[gradients[on_device]].sum())
            last = int(makers[on_device].max())
            up.append(Push(device, size, last, waiting_ops, to_host=True, source=sources[index]))
        for device, size in _used_bytes(step, unit, step.ops, device_of).items():
            last = int(unit.ops.max())
            down.append(Push(device, size, last, to_host=False, source=sources[index]))
    return _by_op(up) + _by_op(down)


def _by_op(pushes: Sequence[Push]) -> list[Push]:
    return sorted(pushes, key=lambda push: push.after_op)


def _used_bytes(
    step: HostedStep, unit: Unit, hosted: IntArray, device_of: IntArray
) -> dict[int, int]:
    """Return the bytes of a unit's weights resident on each device that computes with them."""
    graph, gathered = step.graph, step.gathered
    is_resident = np.isin(graph.uses, unit.weights) & (gathered.unit_of[graph.uses] < 0)
    users = is_resident & ~np.isin(graph.users, hosted)
    pairs = zip(device_of[graph.users[users]].tolist(), graph.uses[users].tolist(), strict=True)
    sizes: dict[int, int] = defaultdict(int)
    for device, weight in sorted(set(pairs)):
        sizes[device] += int(graph.weight_bytes[weight])
    return sizes
