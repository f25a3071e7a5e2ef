"""Optimizer states in the host's memory, where weights are then updated, as ZeRO-Offload does.

The gradients of a block are pushed to the host while the backward goes on, and a device has room
for those of two blocks. The host then updates its own copy of the weights, in the order of the
step's updates, and each block's is pushed back when it is done. What blocks save may go to the host
too, and so may the weights themselves, which are then copied to a device block by block.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.partitions import partition_by_device
from fxpart.core.tiers import Tiers
from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Push, Source, buffer_bytes, with_streams
from fxpart.cost.tables import memory_tables
from fxpart.errors import InfeasibleError, SpecError, show_bytes
from fxpart.placement.offload.activations import Saved, moved, room_bytes, saved_values
from fxpart.placement.offload.costed import sources_of, streams_of
from fxpart.placement.offload.gathered_weights import Gathered, gathered_copies, gathered_of
from fxpart.placement.offload.machine import BoolArray, Machine, with_less
from fxpart.placement.offload.plan import Offloaded, Place, less_stored
from fxpart.placement.offload.units import HOSTED, RESIDENT, Unit
from fxpart.placement.search.fill import place_all

__all__ = ["offload_updates"]

_BUFFERS = 2
"""Blocks whose gradients a device has room for."""


def offload_updates(machine: Machine, place: Place) -> Offloaded:
    """Return a plan of a training step whose states lie in the host's memory: as few as must.

    Those of the last blocks go first: their gradients are there first. Saved activations follow
    where states do not make room.

    Raises:
        InfeasibleError: when the host has no room for them, or the devices none for the rest.
        SpecError: when states may go to a host of which no times are known.

    """
    graph, options = machine.problem.graph, machine.options
    host = machine.tiers.host
    if options.optimizer != "none" and (host.processor is None or machine.host_times is None):
        missing = "times of its operators" if host.processor else "processor"
        raise SpecError(
            f"offload.optimizer={options.optimizer} updates weights on the host, and {host.name}"
            f" has no {missing}; add that, or use offload.optimizer=none"
        )
    units = _with_saving(graph, _update_units(graph))
    # Weights that lie on the host are updated there.
    weights = "none" if options.optimizer == "none" else options.weights
    refused: list[InfeasibleError] = []
    for gathers, saves in product(_tried(weights), _tried(options.activations)):
        # A mode may need more than filling devices does.
        least, most = _least_count(machine, units, saves=saves, gathers=gathers)
        for count in sorted({least, (least + most) // 2, most}):
            try:
                return _finished(machine, _Step(graph, units, count, saves, gathers), place)
            except InfeasibleError as error:
                refused.append(error)
    # With least on the host, and not with all of it: so much more it must have.
    of_host = [error for error in refused if isinstance(error, _FullHostError)]
    raise min(of_host, key=lambda error: error.needed_bytes or 0) if of_host else refused[-1]


class _FullHostError(InfeasibleError):
    """The host has no room for what the devices have none for."""


def _tried(amount: str) -> tuple[bool, ...]:
    """Return whether something is put on the host, in the order in which that is tried."""
    return {"none": (False,), "all": (True,)}.get(amount, (False, True))


def _least_count(
    machine: Machine, units: tuple[Unit, ...], *, saves: bool, gathers: bool
) -> tuple[int, int]:
    """Return how few units must be updated on the host, and how many may be."""

    def fits(count: int) -> bool:
        searched = _searched(machine, _Step(machine.problem.graph, units, count, saves))
        return place_all(searched, searched.topology.memory_bytes.tolist()) is not None

    updated = sum(len(unit.ops) > 0 for unit in units)
    if gathers:
        return updated, updated
    if machine.options.optimizer != "auto":
        return (0, 0) if machine.options.optimizer == "none" else (updated, updated)
    return bisect_left(range(updated), True, key=fits), updated


def _update_units(graph: OpGraph) -> tuple[Unit, ...]:
    """Return the blocks whose weights are updated, that of the first gradient first."""
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
    made, units = {}, []
    for path, updates in ops.items():
        weights = np.unique(np.concatenate([graph.uses_of(op) for op in updates]))
        largest = int(sizes[weights].max())
        unit = Unit(path, weights, np.array(updates), int(sizes[weights].sum()), largest)
        made[path] = min(first[weight] for weight in weights.tolist())
        units.append(unit)
    return tuple(sorted(units, key=lambda unit: made[unit.path]))


def _with_saving(graph: OpGraph, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return the units, and after them blocks that save activations and have no updates."""
    known, none = {unit.path for unit in units}, np.zeros(0, dtype=np.int64)
    blocks = saved_values(graph, np.zeros(graph.n_ops, dtype=np.int64))
    more = (Unit(block.path, none, none, 0, 0) for block in blocks if block.path not in known)
    return (*units, *more)


@dataclass(frozen=True, eq=False)
class _Step:
    """A training step, the first `count` of whose units are updated on the host."""

    graph: OpGraph
    units: tuple[Unit, ...]
    count: int
    saves: bool
    """Whether saved activations go there too."""
    gathers: bool = False
    """Whether weights lie there and are copied to the devices; all units are updated there."""

    @cached_property
    def gathered(self) -> Gathered:
        """The weights that are copied to the devices."""
        if self.gathers:
            return gathered_of(self.graph, [unit.path for unit in self.units])
        none = np.full(len(self.graph.weight_names), -1, dtype=np.int64)
        return Gathered(none, self.graph.weight_bytes)

    @cached_property
    def frozen_bytes(self) -> IntArray:
        """What of each unit lies on the host and is not updated."""
        sizes = np.zeros(len(self.units), dtype=np.int64)
        frozen = self.gathered.unit_of >= 0
        frozen[self.weights] = False
        np.add.at(sizes, self.gathered.unit_of[frozen], self.gathered.sizes[frozen])
        return sizes

    @property
    def hosted(self) -> tuple[Unit, ...]:
        return self.units[: self.count]

    @property
    def ops(self) -> IntArray:
        """Updates on the host, and casts of gradients."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(unit.ops for unit in self.hosted)])

    @property
    def weights(self) -> IntArray:
        """What they update."""
        none = np.zeros(0, dtype=np.int64)
        return np.unique(np.concatenate([none, *(unit.weights for unit in self.hosted)]))

    def gradients(self, unit: Unit) -> IntArray:
        """Return the values that are gradients of a unit's weights."""
        return self.graph.gradient_values[np.isin(self.graph.gradient_weights, unit.weights)]

    def first_op(self, index: int) -> int | None:
        """Return the first operator that makes a gradient of a unit; None where there is none."""
        if index >= self.count:
            return None
        makers = self.graph.value_producer[self.gradients(self.units[index])]
        return int(makers.min()) if makers.min() >= 0 else None

    def split(self) -> OpGraph:
        """Return the graph whose updates on the host use weights of their own.

        Such a weight has room for the weight, its gradient and its state.
        """
        graph, ops, weights = self.graph, self.ops, self.weights
        copy_of = np.full(len(graph.weight_names), -1, dtype=np.int64)
        copy_of[weights] = len(graph.weight_names) + np.arange(len(weights))
        on_host = np.isin(graph.users, ops)
        gradient_bytes = np.zeros(len(graph.weight_names), dtype=np.int64)
        np.add.at(gradient_bytes, graph.gradient_weights, graph.value_bytes[graph.gradient_values])
        stays = graph.weight_state_bytes.copy()
        stays[weights] = 0
        tensors = graph.state_tensor_bytes
        if len(tensors):
            left = tensors.copy()
            left[:, weights] = 0
            tensors = np.concatenate([left, tensors[:, weights]], axis=1)
        return replace(
            _without_gradients(self),
            weight_names=graph.weight_names
            + tuple(f"{graph.weight_names[weight]} on the host" for weight in weights.tolist()),
            weight_bytes=np.concatenate(
                [
                    np.where(self.gathered.unit_of >= 0, 0, graph.weight_bytes),
                    (graph.weight_bytes + gradient_bytes)[weights],
                ]
            ),
            weight_state_bytes=np.concatenate([stays, graph.weight_state_bytes[weights]]),
            state_tensor_bytes=tensors,
            uses=np.where(on_host, copy_of[graph.uses], graph.uses),
        )


def _without_gradients(step: _Step) -> OpGraph:
    """Return the step whose updates on the host read no gradients, which are freed when pushed.

    The gradients of a unit are there until those of the next but one are made.
    """
    graph = step.graph
    held, is_output = np.full(graph.n_values, -1, dtype=np.int64), graph.value_is_output.copy()
    if len(graph.value_held):
        held = graph.value_held.copy()
    for index, unit in enumerate(step.hosted):
        values, later = step.gradients(unit), step.first_op(index + _BUFFERS)
        is_output[values] = False
        held[values] = np.maximum(held[values], graph.n_ops - 1 if later is None else later - 1)
    of_host = np.isin(graph.readers, step.ops) & np.isin(graph.reads, graph.gradient_values)
    dropped = np.bincount(graph.readers[of_host], minlength=graph.n_ops)
    return replace(
        graph,
        reads=graph.reads[~of_host],
        read_start=graph.read_start - np.concatenate([[0], np.cumsum(dropped)]),
        value_is_output=is_output,
        value_held=held,
    )


def _searched(machine: Machine, step: _Step) -> Problem:
    """Return what a mode places: updates on the host take no time and no room on a device."""
    problem, graph = machine.problem, step.split()
    made = np.isin(graph.value_producer, step.ops)
    weights = np.arange(len(graph.weight_names)) >= len(problem.graph.weight_names)
    tensors = graph.state_tensor_bytes
    if len(tensors):
        tensors = np.where(weights, 0, tensors)
    room, topology = 0, problem.topology
    if step.saves:
        blocks = saved_values(graph, np.zeros(graph.n_ops, dtype=np.int64))
        graph, room = _without(graph, blocks), room_bytes(blocks, 1)
    if step.gathers:
        everywhere = np.zeros(graph.n_ops, dtype=np.int64)
        sources = [Source()] * len(step.units)
        copies = gathered_copies(step.graph, step.gathered, everywhere, sources)
        room += int(buffer_bytes(copies, 1, overlap=True)[0])
    if room:
        topology = with_less(topology, room)
    bare = replace(
        graph,
        weight_bytes=np.where(weights, 0, graph.weight_bytes),
        weight_state_bytes=np.where(weights, 0, graph.weight_state_bytes),
        state_tensor_bytes=tensors,
        value_bytes=np.where(made, 0, graph.value_bytes),
        value_alloc_bytes=np.where(made, 0, graph.value_alloc_bytes),
    )
    times = problem.costs.op_time_s.copy()
    times[step.ops] = 0.0
    return replace(_problem_of(problem, bare, times), topology=topology)


def _without(graph: OpGraph, blocks: Sequence[Saved]) -> OpGraph:
    """Return the graph in which what blocks save takes no room."""
    alloc_bytes = graph.value_alloc_bytes.copy()
    for block in blocks:
        alloc_bytes[block.values] = 0
    return replace(graph, value_alloc_bytes=alloc_bytes)


def _problem_of(problem: Problem, graph: OpGraph, op_time_s: np.ndarray) -> Problem:
    memory = memory_tables(graph)
    costs = problem.costs._replace(
        read_start=memory.read_start,
        reads=memory.reads,
        reader_start=memory.reader_start,
        readers=memory.readers,
        value_bytes=memory.value_bytes,
        op_time_s=op_time_s,
    )
    return replace(problem, graph=graph, costs=costs, memory=memory)


def _placed(
    machine: Machine, step: _Step, place: Place
) -> tuple[Problem, IntArray, Sequence[Saved]]:
    """Return the devices and the host, the mode's placement, and what its blocks save there."""
    searched = _searched(machine, step)
    if place_all(searched, searched.topology.memory_bytes.tolist()) is None:
        raise _does_not_fit(searched, step)
    device_of = place(searched).device_of.copy()
    device_of[step.ops] = machine.problem.topology.n_devices
    graph = step.split()
    group = graph.group.copy()
    group[step.ops] = step.ops
    graph = replace(graph, group=group)
    blocks = saved_values(graph, device_of) if step.saves else []
    graph = _without(graph, blocks)
    wide = replace(
        machine, problem=replace(machine.problem, graph=graph, memory=memory_tables(graph))
    )
    return wide.with_host, device_of, blocks


def _finished(machine: Machine, step: _Step, place: Place) -> Offloaded:
    """Return the plan with the mode's own placement."""
    n_devices = machine.problem.topology.n_devices
    final, device_of, blocks = _placed(machine, step, place)
    graph = final.graph
    change = np.empty(graph.n_ops + 1, dtype=np.int64)
    held = int(peak_on_device(final.memory, device_of, n_devices, change))
    saved = _saved_bytes(step.units, blocks)
    _check_host(machine.tiers, held + int(step.frozen_bytes.sum()), int(saved.sum()))
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
    without, _ = schedule(final.costs, device_of, schedule_log(final.costs))
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
        evaluation.latency_s - float(without),
        held,
        machine.problem.topology.devices,
        saved + step.frozen_bytes,
        np.zeros_like(saved),
        tuple(pushes),
        frozen_bytes=int(step.frozen_bytes.sum()),
    )
    return replace(offloaded, evaluation=less_stored(evaluation, offloaded))


def _check_host(tiers: Tiers, held_bytes: int, saved_bytes: int) -> None:
    """Refuse states and saved activations that the host has no room for."""
    host, disk = tiers.host, tiers.disk
    stored = held_bytes + saved_bytes
    if stored > host.memory_bytes:
        raise _FullHostError(
            f"optimizer states, with their weights and gradients {show_bytes(held_bytes)}, and"
            f" activations of {show_bytes(saved_bytes)} do not fit {host.name}, which has"
            f" {show_bytes(host.memory_bytes)}"
            + (f", and nothing of a training step goes to {disk.name}" if disk else "")
            + "; give more host memory or more devices",
            needed_bytes=stored,
            available_bytes=host.memory_bytes,
        )


def _does_not_fit(searched: Problem, step: _Step) -> InfeasibleError:
    n, available = searched.graph.n_ops, int(searched.topology.memory_bytes.sum())
    everywhere, change = np.zeros(n, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    held = int(peak_on_device(searched.memory, everywhere, 0, change))
    gone = f"states of {step.count} modules" + (" and saved activations" if step.saves else "")
    gone += " and weights" if step.gathers else ""
    return InfeasibleError(
        f"with {gone} on the host, tensors of {show_bytes(held)} do not fit the devices'"
        f" {show_bytes(available)}"
        + (" beside room for what two blocks save" if step.saves else "")
        + "; take larger devices, a smaller batch, or checkpointing=block",
        needed_bytes=held,
        available_bytes=available,
    )


def _saved_bytes(units: Sequence[Unit], blocks: Sequence[Saved]) -> IntArray:
    """Return what each unit's block has on the host of what it saves."""
    place = {unit.path: index for index, unit in enumerate(units)}
    sizes = np.zeros(len(units), dtype=np.int64)
    copies, _ = moved(blocks, Source())
    for copy in copies:
        sizes[place[blocks[copy.unit].path]] += copy.size_bytes
    return sizes


def _sources(machine: Machine, step: _Step, saved_bytes: int) -> list[Source]:
    """Return where the tensors of each unit on the host lie, and at last what blocks save."""
    held = [unit.weight_bytes if index < step.count else 0 for index, unit in enumerate(step.units)]
    sizes = np.array([*(step.frozen_bytes + held), saved_bytes], dtype=np.int64)
    return sources_of(machine, sizes, np.zeros(len(sizes), dtype=np.bool_))


def _pushes(step: _Step, device_of: IntArray, sources: Sequence[Source]) -> list[Push]:
    """Return the gradients of each unit as they go to the host, then its weights as they return."""
    graph = step.graph
    up, down = [], []
    for index, unit in enumerate(step.hosted):
        gradients, later = step.gradients(unit), step.first_op(index + _BUFFERS)
        waiting = (*unit.ops.tolist(), *(() if later is None else (later,)))
        makers = np.maximum(graph.value_producer[gradients], 0)
        for device in np.unique(device_of[makers]).tolist():
            here: BoolArray = device_of[makers] == device
            size = int(graph.value_bytes[gradients[here]].sum())
            last = int(makers[here].max())
            up.append(Push(device, size, last, waiting, to_host=True, source=sources[index]))
        for device, size in _used_bytes(step, unit, step.ops, device_of).items():
            last = int(unit.ops.max())
            down.append(Push(device, size, last, to_host=False, source=sources[index]))
    return _by_op(up) + _by_op(down)


def _by_op(pushes: Sequence[Push]) -> list[Push]:
    return sorted(pushes, key=lambda push: push.after_op)


def _used_bytes(step: _Step, unit: Unit, hosted: IntArray, device_of: IntArray) -> dict[int, int]:
    """Return the bytes of a unit's weights that stay on each device that computes with them."""
    graph, gathered = step.graph, step.gathered
    stays = np.isin(graph.uses, unit.weights) & (gathered.unit_of[graph.uses] < 0)
    users = stays & ~np.isin(graph.users, hosted)
    pairs = zip(device_of[graph.users[users]].tolist(), graph.uses[users].tolist(), strict=True)
    sizes: dict[int, int] = defaultdict(int)
    for device, weight in sorted(set(pairs)):
        sizes[device] += int(graph.weight_bytes[weight])
    return sizes
