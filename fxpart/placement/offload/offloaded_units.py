"""Choose the units to offload for a number of bytes, by least time per byte."""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.core.module_paths import block_of
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED

__all__ = ["put_back_order", "stream_order", "ways_of"]

_HOST_SHARE = 0.9
"""Largest share of host memory for weights used there; the rest is for buffers, caches and
tensors."""
_FREE = 0.1
"""Units whose extra time on the host is below this share of their copy time are hosted first, such
as embeddings."""


def ways_of(machine: Machine, target_bytes: int, share: float) -> IntArray:
    """Return the state of each unit if at least `target_bytes` are offloaded, as far as possible.

    Units that are nearly free on the host go there. Of the others, `share` is streamed, or more if
    the host lacks memory; streamed units are interleaved with hosted ones, so that copies run while
    the host computes.
    """
    ways = np.full(len(machine.units), RESIDENT, dtype=np.int64)
    remaining_bytes = target_bytes
    room = _HOST_SHARE * machine.tiers.host.memory_bytes if machine.options.stream else np.inf
    if machine.computes:
        is_cheap = machine.host_s - machine.device_s < _FREE * machine.copy_s
        for unit in (i for i in _host_order(machine) if is_cheap[i] and not machine.is_small[i]):
            size = int(machine.sizes[unit])
            if remaining_bytes > 0 and size <= room:
                ways[unit] = HOSTED
                remaining_bytes -= size
                room -= size
    share = max(share, 1.0 - room / remaining_bytes) if remaining_bytes > 0 else share
    order = stream_order(machine) if share >= 1 else _host_order(machine)
    streamed, total = 0, 0
    for unit in order:
        size = int(machine.sizes[unit])
        if ways[unit] != RESIDENT or total >= remaining_bytes:
            continue
        total += size
        ways[unit] = HOSTED
        if machine.options.stream and streamed + size / 2 < share * total:
            ways[unit] = STREAMED
            streamed += size
    return ways


def put_back_order(machine: Machine, ways: IntArray) -> list[int]:
    """Return the offloaded units in the order of putting them back, most time saved first.

    Ties go to the last offloaded unit, which keeps streamed ones evenly spread.
    """
    hosted = ways == HOSTED
    saved_s = np.where(hosted, machine.host_s - machine.device_s, machine.copy_s).tolist()
    order = _host_order(machine) if hosted.any() else stream_order(machine)
    offloaded = [unit for unit in reversed(order) if ways[unit] != RESIDENT]
    return sorted(offloaded, key=lambda unit: -float(f"{saved_s[unit]:.1e}"))


def stream_order(machine: Machine) -> list[int]:
    """Return the units in streaming order: blocks far apart first, others last.

    Without overlap the last blocks come first, as accelerate fills devices in order.
    """
    is_block = [
        bool(block_of(unit.path)) and not machine.is_small[i]
        for i, unit in enumerate(machine.units)
    ]
    blocks = [i for i, is_one in enumerate(is_block) if is_one]
    others = [i for i, is_one in enumerate(is_block) if not is_one]
    others.sort(key=lambda i: bool(machine.is_small[i]))
    if not machine.options.overlap:
        return [*reversed(blocks), *reversed(others)]
    # Van der Corput's sequence, of which any prefix is evenly spread.
    bits = max(1, (len(blocks) - 1).bit_length())
    spread = sorted(range(len(blocks)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [*(blocks[i] for i in spread), *others]


def _host_order(machine: Machine) -> list[int]:
    """Return the units in the order of moving them to the host, least time per byte first."""
    more_s = np.maximum(machine.host_s - machine.device_s, 0.0) / np.maximum(machine.sizes, 1)
    rounded = [float(f"{ratio:.1e}") for ratio in more_s.tolist()]
    return sorted(
        range(len(machine.units)), key=lambda i: (bool(machine.is_small[i]), rounded[i], i)
    )
