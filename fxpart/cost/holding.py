"""Memory of each device under a placement, including replicas; decides whether it fits."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.cost.kernels import device_memory
from fxpart.cost.tables import MemoryTables
from fxpart.support.compiled import compiled

__all__ = ["Holding", "holding", "live_bytes", "weight_bytes_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Holding:
    """Memory in bytes. Arrays have one item per device."""

    weight_bytes: IntArray
    """Weights of all partitions on the device, whether or not it is their turn; tied weights
    once."""
    live_bytes: IntArray
    """Peak of inputs and live tensors over all rounds."""
    unfreed_bytes: IntArray
    """Inputs and everything produced or received in one round, maximized over rounds."""
    first_live_bytes: tuple[IntArray, ...]
    """Inputs and live tensors at each operator that the device runs in the first round."""

    @property
    def peak_bytes(self) -> IntArray:
        """Peak bytes on each device."""
        return self.weight_bytes + self.live_bytes

    @property
    def static_bytes(self) -> IntArray:
        """Bytes on each device if nothing were ever freed."""
        return self.weight_bytes + self.unfreed_bytes


def weight_bytes_of(memory: MemoryTables, operators: IntArray) -> int:
    """Return the total bytes of the weights used by `operators`."""
    chosen = np.zeros(len(memory.use_start) - 1, dtype=np.bool_)
    chosen[operators] = True
    used = memory.uses[np.repeat(chosen, np.diff(memory.use_start))]
    return int(memory.weight_bytes[np.unique(used)].sum())


@compiled
def _made_and_received(m: MemoryTables, device_of: IntArray, device: int) -> tuple[int, int]:
    """Return (bytes of weights used on the device, bytes produced or received there)."""
    present = np.zeros(m.producer.shape[0], dtype=np.bool_)
    weight_seen = np.zeros(m.weight_bytes.shape[0], dtype=np.bool_)
    weights, total = 0, 0
    for op in range(device_of.shape[0]):
        if device_of[op] != device:
            continue
        for i in range(m.use_start[op], m.use_start[op + 1]):
            if not weight_seen[m.uses[i]]:
                weight_seen[m.uses[i]] = True
                weights += m.weight_bytes[m.uses[i]]
        for value in range(m.made_start[op], m.made_start[op + 1]):
            present[value] = True
            total += m.alloc_bytes[value]
        for i in range(m.read_start[op], m.read_start[op + 1]):
            value = m.reads[i]
            if m.producer[value] >= 0 and not present[value]:
                present[value] = True
                total += m.value_bytes[value]
    return weights, total


def live_bytes(memory: MemoryTables, device_of: IntArray, device: int) -> IntArray:
    """Return the bytes of inputs and live tensors on `device` at each operator of the graph.

    Only inputs read on the device count; all zero if it has no operators. Shape (n,).
    """
    return _live_and_unfreed(memory, device_of, device)[0]


def _live_and_unfreed(
    memory: MemoryTables, device_of: IntArray, device: int
) -> tuple[IntArray, int]:
    """Return `live_bytes`, and the bytes of inputs and everything produced or received."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    resident, operators = device_memory(memory, device_of, device, change)
    if not operators:
        return np.zeros(len(device_of), dtype=np.int64), 0
    weights, passing = _made_and_received(memory, device_of, device)
    inputs = int(resident) - int(weights)
    live: IntArray = inputs + np.cumsum(change[:-1])
    return live, inputs + int(passing)


def holding(memory: MemoryTables, assignment: Assignment, devices: int) -> Holding:
    """Return the memory of each of `devices` devices under `assignment`.

    A device keeps the weights of all its partitions, plus the tensors of the largest round that it
    takes part in. O(rounds x devices of a round x (n + reads)).
    """
    peak_live = np.zeros(devices, dtype=np.int64)
    unfreed = np.zeros(devices, dtype=np.int64)
    first = [np.empty(0, dtype=np.int64)] * devices
    for index in range(assignment.rounds):
        device_of = assignment.device_of_round(index)
        for device in np.unique(device_of).tolist():
            live, unfreed_bytes = _live_and_unfreed(memory, device_of, device)
            peak_live[device] = max(peak_live[device], int(live.max()))
            unfreed[device] = max(unfreed[device], unfreed_bytes)
            if index == 0:
                first[device] = live[device_of == device]
    return Holding(_weights_held(memory, assignment, devices), peak_live, unfreed, tuple(first))


def _weights_held(memory: MemoryTables, assignment: Assignment, devices: int) -> IntArray:
    needed = np.zeros((devices, assignment.n_partitions), dtype=np.bool_)
    for partition, homes in enumerate(assignment.devices_of_partition):
        needed[list(homes), partition] = True
    weights = np.zeros(devices, dtype=np.int64)
    for device in np.flatnonzero(needed.any(axis=1)).tolist():
        ops = np.flatnonzero(needed[device, assignment.partition_of])
        weights[device] = weight_bytes_of(memory, ops)
    return weights
