"""Offloading of saved activations to host memory, as in torchtune and FairScale.

Activations saved by blocks in the forward are copied to the host and prefetched for the backward. A
device can buffer those of two blocks: the last two blocks of each device stay, and each of the
others is live while the next one is copied.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph, storage_roots
from fxpart.core.module_paths import block_of
from fxpart.cost.streams import Copy, Push, Source, buffer_bytes

__all__ = ["Saved", "moved", "room_bytes", "saved_values"]

_BUFFERS = 2
"""Number of blocks whose saved activations a device can buffer."""


class Saved(NamedTuple):
    """The activations saved by a block on one device."""

    path: str
    device: int
    values: IntArray
    """The saved values that own their storage."""
    size_bytes: int
    first_op: int
    """The first operator that produces any of it."""
    last_op: int
    """The last operator that produces any of it."""
    first_reader: int
    """The first reader in the backward."""
    last_reader: int


def saved_values(graph: OpGraph, device_of: IntArray) -> list[Saved]:
    """Return the activations saved and read on the same device by block, in forward order.

    Activations outside of blocks, and results of the graph, are not included.
    """
    root = storage_roots(graph)
    backward = graph.is_backward
    maker, readers = graph.value_producer, graph.readers
    is_saved = (maker >= 0) & (graph.value_base < 0) & (graph.value_alloc_bytes > 0)
    is_saved &= ~backward[np.maximum(maker, 0)]
    is_saved[root[graph.value_is_output]] = False
    source = root[graph.reads]
    late = backward[readers] & is_saved[source]
    late &= device_of[readers] == device_of[np.maximum(maker[source], 0)]
    first, last = np.full(graph.n_values, graph.n_ops), np.full(graph.n_values, -1)
    np.minimum.at(first, source[late], readers[late])
    np.maximum.at(last, source[late], readers[late])
    of_block: dict[tuple[str, int], list[int]] = defaultdict(list)
    for value in np.flatnonzero(is_saved & (last >= 0)).tolist():
        if path := block_of(graph.modules[maker[value]]):
            of_block[path, int(device_of[maker[value]])].append(value)
    blocks = []
    for (path, device), numbers in of_block.items():
        values = np.array(numbers, dtype=np.int64)
        makers, size = maker[values], int(graph.value_alloc_bytes[values].sum())
        ends = (
            int(makers.min()),
            int(makers.max()),
            int(first[values].min()),
            int(last[values].max()),
        )
        blocks.append(Saved(path, device, values, size, *ends))
    return sorted(blocks, key=lambda block: block.first_op)


def room_bytes(blocks: Sequence[Saved], devices: int) -> int:
    """Return the largest buffer for saved activations on any of `devices` devices."""
    copies, _ = moved(blocks, Source())
    return int(buffer_bytes(copies, devices, overlap=True).max(initial=0))


def moved(blocks: Sequence[Saved], source: Source) -> tuple[list[Copy], list[Push]]:
    """Return the copies back for the backward, and the pushes to the host in the forward.

    Activations of a device's last blocks stay, and take memory but no time.
    """
    copies, pushes = [], []
    for device in sorted({block.device for block in blocks}):
        on_device = [number for number, block in enumerate(blocks) if block.device == device]
        for index, number in enumerate(on_device):
            block = blocks[number]
            is_moved = index < len(on_device) - _BUFFERS
            size, resident_bytes = (block.size_bytes, 0) if is_moved else (0, block.size_bytes)
            ends = block.first_reader, block.last_reader
            copies.append(Copy(number, device, size, *ends, source, resident_bytes, not is_moved))
            if is_moved:
                later = (blocks[on_device[index + _BUFFERS]].first_op,)
                pushes.append(Push(device, size, block.last_op, later, source=source))
    copies.sort(key=lambda copy: copy.first_op)
    pushes.sort(key=lambda push: push.after_op)
    return copies, pushes
