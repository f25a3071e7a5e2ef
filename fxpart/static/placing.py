"""`Placing`: a device for each operator, and what each device holds, kept up to date by moves."""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.tables import Tables

__all__ = ["Placing", "fits", "overflow", "placing_of", "shift"]


class Placing(NamedTuple):
    """A device for each of n operators, with D devices and m sources. Changed in place."""

    device: IntArray
    """Position of each operator's device. Length n."""
    used: IntArray
    """Bytes that each device needs, as `fxpart.static.memory.used_bytes` counts. Length D."""
    held: IntArray
    """How many operators of a device read a source. Shape (D, m)."""


@compiled
def shift(tables: Tables, placing: Placing, op: int, there: int) -> None:
    """Move `op` to device `there`. O(what it reads and what reads it)."""
    device, used = placing.device, placing.used
    here = device[op]
    if here == there:
        return
    used[here] -= tables.total[op]
    used[there] += tables.total[op]
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        maker = tables.reads[i]
        if device[maker] != here:
            used[here] -= tables.output[maker]
        if device[maker] != there:
            used[there] += tables.output[maker]
    for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
        if device[tables.readers[i]] == here:
            used[here] += tables.output[op]
        elif device[tables.readers[i]] == there:
            used[there] -= tables.output[op]
    for i in range(tables.source_start[op], tables.source_start[op + 1]):
        source = tables.sources[i]
        placing.held[here, source] -= 1
        if placing.held[here, source] == 0:
            used[here] -= tables.source_bytes[source]
        if placing.held[there, source] == 0:
            used[there] += tables.source_bytes[source]
        placing.held[there, source] += 1
    device[op] = there


@compiled
def placing_of(tables: Tables, device_of: IntArray, devices: int) -> Placing:
    """Return the placing with these devices. O(reads)."""
    held = np.zeros((devices, tables.source_bytes.shape[0]), dtype=np.int64)
    used = np.zeros(devices, dtype=np.int64)
    for op in range(device_of.shape[0]):
        here = device_of[op]
        used[here] += tables.total[op]
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            if device_of[tables.reads[i]] != here:
                used[here] += tables.output[tables.reads[i]]
        for i in range(tables.source_start[op], tables.source_start[op + 1]):
            source = tables.sources[i]
            if held[here, source] == 0:
                used[here] += tables.source_bytes[source]
            held[here, source] += 1
    return Placing(device_of.copy(), used, held)


@compiled
def fits(placing: Placing, memory: IntArray) -> bool:
    """Return whether each device holds what lies on it."""
    return bool((placing.used <= memory).all())


@compiled
def overflow(placing: Placing, memory: IntArray) -> int:
    """Return the bytes by which devices are exceeded, in all."""
    over = 0
    for device in range(memory.shape[0]):
        over += max(0, placing.used[device] - memory[device])
    return over
