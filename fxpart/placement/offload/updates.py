"""Optimizer states in the host's memory, where weights are then updated, as ZeRO-Offload does.

The gradients of a block are pushed to the host while the backward goes on, and a device has room
for those of two blocks. The host then updates its own copy of the weights, in the order of the
step's updates, and each block's is pushed back when it is done. Weights stay on the devices.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.partitions import partition_by_device
from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Push, with_streams
from fxpart.cost.tables import memory_tables
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.offload.costed import sources_of, streams_of
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.plan import Offloaded, Place
from fxpart.placement.offload.units import HOSTED, RESIDENT, Unit
from fxpart.placement.search.fill import place_all

__all__ = ["offload_updates"]

_BUFFERS = 2
"""Blocks whose gradients a device has room for."""


def offload_updates(machine: Machine, place: Place) -> Offloaded:
    """Return a plan of a training step whose states lie in the host's memory: as few as must.

    Those of the last blocks go first: their gradients are there first.

    Raises:
        InfeasibleError: when the host has no room for them, or the devices none for the rest.

    """
    units = _update_units(machine.problem.graph)
    all_of_them, least = len(units), len(units)
    if machine.options.optimizer == "auto":

        def fits(count: int) -> bool:
            searched = _searched(machine, _Step(machine.problem.graph, units, count))
            return place_all(searched, searched.topology.memory_bytes.tolist()) is not None

        least = bisect_left(range(all_of_them), True, key=fits)
    refused: InfeasibleError | None = None
    # A mode may need more than filling devices does.
    for count in sorted({least, (least + all_of_them) // 2, all_of_them}):
        try:
            return _finished(machine, _Step(machine.problem.graph, units, count), place)
        except InfeasibleError as error:
            refused = refused or error
    assert refused is not None
    raise refused


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


@dataclass(frozen=True, eq=False)
class _Step:
    """A training step, the first `count` of whose units are updated on the host."""

    graph: OpGraph
    units: tuple[Unit, ...]
    count: int

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
                [graph.weight_bytes, (graph.weight_bytes + gradient_bytes)[weights]]
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
    return _problem_of(problem, bare, times)


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


def _finished(machine: Machine, step: _Step, place: Place) -> Offloaded:
    """Return the plan with the mode's own placement."""
    n_devices = machine.problem.topology.n_devices
    device_of = place(_searched(machine, step)).device_of.copy()
    device_of[step.ops] = n_devices
    graph = step.split()
    group = graph.group.copy()
    group[step.ops] = step.ops
    graph = replace(graph, group=group)
    wide = replace(
        machine, problem=replace(machine.problem, graph=graph, memory=memory_tables(graph))
    )
    final, host = wide.with_host, machine.tiers.host
    change = np.empty(graph.n_ops + 1, dtype=np.int64)
    held = int(peak_on_device(final.memory, device_of, n_devices, change))
    if held > host.memory_bytes:
        raise InfeasibleError(
            f"optimizer states, with their weights and gradients {show_bytes(held)}, do not fit"
            f" {host.name}, which has {show_bytes(host.memory_bytes)}; give more host memory or"
            " more devices",
            needed_bytes=held,
            available_bytes=host.memory_bytes,
        )
    pushes = _pushes(machine, step, device_of)
    evaluation = with_streams(
        final,
        partition_by_device(graph, device_of),
        (),
        streams_of(machine, n_devices + 1),
        pushes=pushes,
        bound_s=lower_bound_s(final),
        least_load_s=load_bound_s(final),
    )
    without, _ = schedule(final.costs, device_of, schedule_log(final.costs))
    ways = np.full(len(step.units), RESIDENT, dtype=np.int64)
    ways[: step.count] = HOSTED
    nothing = np.zeros(len(step.units), dtype=np.int64)
    return Offloaded(
        final,
        partition_by_device(graph, device_of),
        evaluation,
        step.units,
        ways,
        np.zeros(len(step.units), dtype=np.bool_),
        (),
        (),
        evaluation.latency_s - float(without),
        held,
        machine.problem.topology.devices,
        nothing,
        nothing,
        tuple(pushes),
    )


def _pushes(machine: Machine, step: _Step, device_of: IntArray) -> list[Push]:
    """Return the gradients of each unit as they go to the host, then its weights as they return."""
    graph = step.graph
    sizes = np.array([unit.weight_bytes for unit in step.hosted], dtype=np.int64)
    sources = sources_of(machine, sizes, np.zeros(len(sizes), dtype=np.bool_))
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
        for device, size in _used_bytes(graph, unit, step.ops, device_of).items():
            last = int(unit.ops.max())
            down.append(Push(device, size, last, to_host=False, source=sources[index]))
    return _by_op(up) + _by_op(down)


def _by_op(pushes: Sequence[Push]) -> list[Push]:
    return sorted(pushes, key=lambda push: push.after_op)


def _used_bytes(
    graph: OpGraph, unit: Unit, hosted: IntArray, device_of: IntArray
) -> dict[int, int]:
    """Return the bytes of a unit's weights on each device that computes with them."""
    users = np.isin(graph.uses, unit.weights) & ~np.isin(graph.users, hosted)
    pairs = zip(device_of[graph.users[users]].tolist(), graph.uses[users].tolist(), strict=True)
    sizes: dict[int, int] = defaultdict(int)
    for device, weight in sorted(set(pairs)):
        sizes[device] += int(graph.weight_bytes[weight])
    return sizes
