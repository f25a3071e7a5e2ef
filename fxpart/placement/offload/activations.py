"""Saved activations in the host's memory, as torchtune and FairScale's checkpoints offload them.

What blocks save in the forward goes to the host and comes back for the backward. A device has room
for what two blocks save: the last two of each device stay, and of the others each is there while
the next one comes or goes.
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
"""Blocks whose saved tensors a device has room for."""


class Saved(NamedTuple):
    """What a block saves for the backward on one device."""

    path: str
    device: int
    values: IntArray
    """Those with storage of their own."""
    size_bytes: int
    first_op: int
    """That makes some of it."""
    last_op: int
    """The last that does."""
    first_reader: int
    """Of the backward."""
    last_reader: int


def saved_values(graph: OpGraph, device_of: IntArray) -> list[Saved]:
    """Return what blocks save on the devices that also read it, in the order of the forward.

    What is saved outside blocks, and what the caller gets, stays.
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
        made, size = maker[values], int(graph.value_alloc_bytes[values].sum())
        ends = int(made.min()), int(made.max()), int(first[values].min()), int(last[values].max())
        blocks.append(Saved(path, device, values, size, *ends))
    return sorted(blocks, key=lambda block: block.first_op)


def room_bytes(blocks: Sequence[Saved], devices: int) -> int:
    """Return the room for saved tensors that any of so many devices needs."""
    copies, _ = moved(blocks, Source())
    return int(buffer_bytes(copies, devices, overlap=True).max(initial=0))


def moved(blocks: Sequence[Saved], source: Source) -> tuple[list[Copy], list[Push]]:
    """Return what comes back for the backward, and what goes to the host in the forward.

    What stays of a device's last blocks takes room and no time.
    """
    copies, pushes = [], []
    for device in sorted({block.device for block in blocks}):
        here = [number for number, block in enumerate(blocks) if block.device == device]
        for index, number in enumerate(here):
            block = blocks[number]
            goes = index < len(here) - _BUFFERS
            size, stays = (block.size_bytes, 0) if goes else (0, block.size_bytes)
            ends = block.first_reader, block.last_reader
            copies.append(Copy(number, device, size, *ends, source, stays, not goes))
            if goes:
                later = (blocks[here[index + _BUFFERS]].first_op,)
                pushes.append(Push(device, size, block.last_op, later, source=source))
    copies.sort(key=lambda copy: copy.first_op)
    pushes.sort(key=lambda push: push.after_op)
    return copies, pushes
