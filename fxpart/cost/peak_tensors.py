"""The memory peak of each device, and the tensors that are live at it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import CAST, UPDATE, IntArray, OpGraph
from fxpart.cost.holding import live_bytes
from fxpart.cost.problem import Problem
from fxpart.cost.storage_kinds import (
    KINDS,
    StorageFacts,
    Storages,
    short_name,
    storage_facts,
    storages_on,
)
from fxpart.cost.tables import MemoryTables, memory_tables

__all__ = [
    "DevicePeak",
    "LiveTensor",
    "device_peaks",
    "doing",
    "memory_by_kind",
    "peaks_in_turn",
    "storages_at_peak",
]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One storage on a device."""

    name: str
    """Name of the value that it was allocated for, or of its weight."""
    module: str
    """The module whose operator produced it, or that owns the weight; ``""`` for the root."""
    target: str
    """The operator that produced it, such as ``aten.linear.default``; ``""`` if none did."""
    kind: str
    """One of `KINDS`."""
    bytes: int


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The memory peak of a device."""

    device: int
    """Logical id."""
    op: int
    """The operator that runs at the peak, the first if there are several."""
    op_name: str
    module: str
    """Module of the operator."""
    doing: str
    """Description of the operator, as returned by `doing`."""
    bytes: int
    """Total bytes at the peak; the sum of `by_kind`."""
    by_kind: Mapping[str, int]
    """Bytes of each kind with live storages, in the order of `KINDS`."""
    tensors: tuple[LiveTensor, ...]
    """The largest live storages, largest first."""


def device_peaks(problem: Problem, assignment: Assignment, top: int = 10) -> tuple[DevicePeak, ...]:
    """Return the peak of each device in use with the `top` largest storages, by logical id.

    The bytes are those of `Evaluation`: all weights on a device plus the tensors of its worst
    round. O(devices x (n + reads)) per round.

    Raises:
        SpecError: if the assignment is for another graph or uses devices that do not exist.

    """
    graph = problem.graph
    assignment.check_for(graph.n_ops, problem.topology.n_devices)
    peaks = []
    for device, _, storages, op in storages_at_peak(problem, assignment):
        live = storages.at(op)
        sums = storages.bytes_by_kind(live).tolist()
        # A stable sort keeps ties in graph order.
        largest = live[np.argsort(-storages.size_bytes[live], kind="stable")][:top]
        peaks.append(
            DevicePeak(
                device,
                op,
                graph.names[op],
                graph.modules[op],
                doing(graph, op),
                sum(sums),
                {kind: size for kind, size in zip(KINDS, sums, strict=True) if size},
                tuple(_tensor(graph, storages, int(i)) for i in largest if storages.size_bytes[i]),
            )
        )
    return tuple(peaks)


def storages_at_peak(
    problem: Problem, assignment: Assignment
) -> Iterator[tuple[int, IntArray, Storages, int]]:
    """Yield (device, device of each operator, storages, operator) at the peak of each used device.

    Devices are in the order of logical ids, each in its worst round.
    """
    facts = _facts(problem.graph)
    for device, weights in _weights_of_devices(problem.graph, assignment).items():
        device_of, op = _fullest(problem, assignment, device)
        yield device, device_of, storages_on(facts, device_of, device, weights), op


def peaks_in_turn(
    graph: OpGraph, memory: MemoryTables, assignment: Assignment, devices: int
) -> tuple[int, ...]:
    """Return the peak bytes of each of `devices` devices if partitions run in turn, by number.

    `memory` has the tables of `graph`. O(rounds x devices x (n log n + reads)).
    """
    facts, peaks = storage_facts(graph, memory), [0] * devices
    for device, weights in _weights_of_devices(graph, assignment).items():
        for index in range(assignment.rounds):
            device_of = assignment.device_of_round(index)
            storages = storages_on(facts, device_of, device, weights)
            in_turn_bytes = storages.peak_bytes_in_turn(assignment.partition_of)
            peaks[device] = max(peaks[device], in_turn_bytes)
    return tuple(peaks)


def memory_by_kind(graph: OpGraph, assignment: Assignment, devices: int) -> tuple[IntArray, ...]:
    """Return the bytes of each kind on each of `devices` devices while its operators run.

    One array per device of shape (len(KINDS), operators run for the first input); its columns sum
    to `MemoryProfile.held_bytes`.
    """
    facts = _facts(graph)
    device_of, weights = assignment.device_of, _weights_of_devices(graph, assignment)
    no_operators = np.zeros((len(KINDS), 0), dtype=np.int64)
    return tuple(
        _over_time(facts, device_of, device, weights[device]) if device in weights else no_operators
        for device in range(devices)
    )


@lru_cache(maxsize=4)
def _facts(graph: OpGraph) -> StorageFacts:
    """Return the facts of a graph, cached for all of its plans."""
    return storage_facts(graph, memory_tables(graph))


def _over_time(
    facts: StorageFacts, device_of: IntArray, device: int, weights: IntArray
) -> IntArray:
    """Return the bytes of each kind (row) at each operator of the device (column)."""
    storages = storages_on(facts, device_of, device, weights)
    change = np.zeros((len(KINDS), len(device_of) + 1), dtype=np.int64)
    np.add.at(change, (storages.kind, storages.born), storages.size_bytes)
    np.subtract.at(change, (storages.kind, storages.last + 1), storages.size_bytes)
    return np.cumsum(change, axis=1)[:, np.flatnonzero(device_of == device)]


def _weights_of_devices(graph: OpGraph, assignment: Assignment) -> dict[int, IntArray]:
    """Return the weights of all partitions on each device, by logical id."""
    devices = sorted({device for homes in assignment.devices_of_partition for device in homes})
    users, weights_of = graph.users, {}
    for device in devices:
        on_device = np.isin(assignment.partition_of, assignment.holds(device))
        weights_of[device] = np.unique(graph.uses[on_device[users]])
    return weights_of


def _fullest(problem: Problem, assignment: Assignment, device: int) -> tuple[IntArray, int]:
    """Return the device of each operator in the worst round of `device`, and its peak operator."""
    peak_live, fullest = -1, None
    for index in range(assignment.rounds):
        device_of = assignment.device_of_round(index)
        ops = np.flatnonzero(device_of == device)
        if not len(ops):
            continue
        # Between operators of the device, memory can only grow by receiving, so the peak is at one
        # of them.
        live = live_bytes(problem.memory, device_of, device)[ops]
        peak_index = int(np.argmax(live))
        if int(live[peak_index]) > peak_live:
            peak_live, fullest = int(live[peak_index]), (device_of, int(ops[peak_index]))
    assert fullest is not None, "a device with a partition computes in some round"
    return fullest


def doing(graph: OpGraph, op: int) -> str:
    """Return a description of an operator.

    Examples are ``gelu``, ``backward of gelu``, ``mm in the backward``, ``cast of a gradient`` and
    ``adam update``.
    """
    target = graph.targets[op]
    if target == CAST:
        return "cast of a gradient"
    if target.startswith(UPDATE):
        return f"{target.removeprefix(UPDATE)} update"
    name = short_name(target)
    if graph.forward_of[op] == op:
        return name
    forward = name.removesuffix("_backward")
    return f"{name} in the backward" if forward == name else f"backward of {forward}"


def _tensor(graph: OpGraph, storages: Storages, index: int) -> LiveTensor:
    kind, source = KINDS[storages.kind[index]], int(storages.source[index])
    size = int(storages.size_bytes[index])
    if kind in KINDS[:2]:
        name = graph.weight_names[source]
        return LiveTensor(name, name.rpartition(".")[0], "", kind, size)
    maker = int(graph.value_producer[source])
    module, target = (graph.modules[maker], graph.targets[maker]) if maker >= 0 else ("", "")
    return LiveTensor(graph.value_names[source], module, target, kind, size)
