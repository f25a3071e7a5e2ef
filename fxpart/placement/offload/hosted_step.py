"""A training step, part of whose weights are updated on the host, as a graph to place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Source, buffer_bytes
from fxpart.cost.tables import memory_tables
from fxpart.placement.offload.activations import Saved, room_bytes, saved_values
from fxpart.placement.offload.gathered_weights import Gathered, gathered_copies, gathered_of
from fxpart.placement.offload.machine import Machine, with_less
from fxpart.placement.offload.units import Unit

__all__ = ["BUFFERS", "HostedStep", "searched_step", "without_saved"]

BUFFERS = 2
"""Number of blocks whose gradients a device can buffer."""


@dataclass(frozen=True, eq=False)
class HostedStep:
    """A training step with the first `count` units updated on the host."""

    graph: OpGraph
    units: tuple[Unit, ...]
    count: int
    saves: bool
    """Whether saved activations are offloaded too."""
    gathers: bool = False
    """Whether weights are kept on the host and copied to the devices; then all units are updated
    there."""

    @cached_property
    def gathered(self) -> Gathered:
        """The weights that are copied to devices."""
        if self.gathers:
            return gathered_of(self.graph, [unit.path for unit in self.units])
        none = np.full(len(self.graph.weight_names), -1, dtype=np.int64)
        return Gathered(none, self.graph.weight_bytes)

    @cached_property
    def frozen_bytes(self) -> IntArray:
        """Bytes of each unit's weights on the host that are not updated."""
        sizes = np.zeros(len(self.units), dtype=np.int64)
        frozen = self.gathered.unit_of >= 0
        frozen[self.weights] = False
        np.add.at(sizes, self.gathered.unit_of[frozen], self.gathered.sizes[frozen])
        return sizes

    @property
    def hosted(self) -> tuple[Unit, ...]:
        """The units that are updated on the host."""
        return self.units[: self.count]

    @property
    def ops(self) -> IntArray:
        """Operators of updates on the host, including casts of gradients."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(unit.ops for unit in self.hosted)])

    @property
    def weights(self) -> IntArray:
        """Weights that are updated on the host."""
        none = np.zeros(0, dtype=np.int64)
        return np.unique(np.concatenate([none, *(unit.weights for unit in self.hosted)]))

    def gradients(self, unit: Unit) -> IntArray:
        """Return the gradients of a unit's weights."""
        return self.graph.gradient_values[np.isin(self.graph.gradient_weights, unit.weights)]

    def first_op(self, index: int) -> int | None:
        """Return the first operator that produces a gradient of a unit, if any."""
        if index >= self.count:
            return None
        makers = self.graph.value_producer[self.gradients(self.units[index])]
        return int(makers.min()) if makers.min() >= 0 else None

    def split(self) -> OpGraph:
        """Return the graph with separate weights for updates on the host.

        Such a weight's size covers the weight, its gradient and its state.
        """
        graph, ops, weights = self.graph, self.ops, self.weights
        copy_of = np.full(len(graph.weight_names), -1, dtype=np.int64)
        copy_of[weights] = len(graph.weight_names) + np.arange(len(weights))
        on_host = np.isin(graph.users, ops)
        gradient_bytes = np.zeros(len(graph.weight_names), dtype=np.int64)
        np.add.at(gradient_bytes, graph.gradient_weights, graph.value_bytes[graph.gradient_values])
        state_bytes = graph.weight_state_bytes.copy()
        state_bytes[weights] = 0
        tensors, is_buffer = graph.state_tensor_bytes, graph.weight_is_buffer
        if len(is_buffer):
            is_buffer = np.concatenate([is_buffer, is_buffer[weights]])
        if len(tensors):
            device_tensors = tensors.copy()
            device_tensors[:, weights] = 0
            tensors = np.concatenate([device_tensors, tensors[:, weights]], axis=1)
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
            weight_state_bytes=np.concatenate([state_bytes, graph.weight_state_bytes[weights]]),
            state_tensor_bytes=tensors,
            weight_is_buffer=is_buffer,
            uses=np.where(on_host, copy_of[graph.uses], graph.uses),
        )


def _without_gradients(step: HostedStep) -> OpGraph:
    """Return the step with gradients freed when pushed, and so not read by updates on the host.

    The gradients of a unit live until those of the second next unit are produced.
    """
    graph = step.graph
    held_until, is_output = (
        np.full(graph.n_values, -1, dtype=np.int64),
        graph.value_is_output.copy(),
    )
    if len(graph.value_held):
        held_until = graph.value_held.copy()
    for index, unit in enumerate(step.hosted):
        values, later = step.gradients(unit), step.first_op(index + BUFFERS)
        is_output[values] = False
        held_until[values] = np.maximum(
            held_until[values], graph.n_ops - 1 if later is None else later - 1
        )
    of_host = np.isin(graph.readers, step.ops) & np.isin(graph.reads, graph.gradient_values)
    dropped = np.bincount(graph.readers[of_host], minlength=graph.n_ops)
    return replace(
        graph,
        reads=graph.reads[~of_host],
        read_start=graph.read_start - np.concatenate([[0], np.cumsum(dropped)]),
        value_is_output=is_output,
        value_held=held_until,
    )


def searched_step(machine: Machine, step: HostedStep) -> Problem:
    """Return the problem for the mode, in which updates on the host take no time or memory."""
    problem, graph = machine.problem, step.split()
    is_hosted = np.isin(graph.value_producer, step.ops)
    weights = np.arange(len(graph.weight_names)) >= len(problem.graph.weight_names)
    tensors = graph.state_tensor_bytes
    if len(tensors):
        tensors = np.where(weights, 0, tensors)
    buffer, topology = 0, problem.topology
    if step.saves:
        blocks = saved_values(graph, np.zeros(graph.n_ops, dtype=np.int64))
        graph, buffer = without_saved(graph, blocks), room_bytes(blocks, 1)
    if step.gathers:
        one_device = np.zeros(graph.n_ops, dtype=np.int64)
        sources = [Source()] * len(step.units)
        copies = gathered_copies(step.graph, step.gathered, one_device, sources)
        buffer += int(buffer_bytes(copies, 1, overlap=True)[0])
    if buffer:
        topology = with_less(topology, buffer)
    bare = replace(
        graph,
        weight_bytes=np.where(weights, 0, graph.weight_bytes),
        weight_state_bytes=np.where(weights, 0, graph.weight_state_bytes),
        state_tensor_bytes=tensors,
        value_bytes=np.where(is_hosted, 0, graph.value_bytes),
        value_alloc_bytes=np.where(is_hosted, 0, graph.value_alloc_bytes),
    )
    times = problem.costs.op_time_s.copy()
    times[step.ops] = 0.0
    return replace(_problem_of(problem, bare, times), topology=topology)


def without_saved(graph: OpGraph, blocks: Sequence[Saved]) -> OpGraph:
    """Return the graph with saved activations of blocks taking no memory."""
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
