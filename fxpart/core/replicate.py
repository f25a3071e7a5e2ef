"""Replicate used devices on idle ones, as many times as the idle ones have room for.

The rule of ``Partitioner.saturate_host`` in ``torch.fx.experimental.accelerator_partitioner``: in
each round every used device is given the smallest idle device with enough memory for its load, the
first among equals. A round in which any device finds none is discarded, and is the last. The caller
defines the load: bytes that are never freed, or the peak of live tensors.
"""

from bisect import bisect_left

import numpy as np

from fxpart.core.graph import IntArray

__all__ = ["Homes", "copies", "replicate"]

Homes = tuple[tuple[int, ...], ...]
"""Indices of the devices that hold each partition."""


def copies(
    needed_bytes: IntArray, used: list[int], memory_bytes: IntArray, max_rounds: int | None = None
) -> list[list[int]]:
    """Return the copies of each device in `used`, one per round.

    All used devices get the same number of copies. O(used x devices).

    Args:
        needed_bytes: load of each device. Shape (D,).
        used: indices of the devices to copy, in the order in which they choose.
        memory_bytes: memory of each device. Shape (D,).
        max_rounds: largest number of rounds; None for no limit.

    """
    used_devices = set(used)
    idle = sorted(
        (int(size), device)
        for device, size in enumerate(memory_bytes)
        if device not in used_devices
    )
    copies_of: list[list[int]] = [[] for _ in used]
    while (
        used and len(idle) >= len(used) and (max_rounds is None or len(copies_of[0]) < max_rounds)
    ):
        chosen = []
        for device in used:
            position = bisect_left(idle, (int(needed_bytes[device]), -1))
            if position == len(idle):
                return copies_of
            chosen.append(idle.pop(position)[1])
        for copy_list, copy in zip(copies_of, chosen, strict=True):
            copy_list.append(copy)
    return copies_of


def replicate(used: IntArray, homes: Homes, memory: IntArray) -> Homes:
    """Return the devices of each partition, with the copies of its devices appended.

    The load of a device is the sum of its partitions.

    Args:
        used: bytes of each partition. Shape (P,).
        homes: indices of the devices that hold each partition. Length P.
        memory: bytes of each device. Shape (D,).

    """
    on_device = np.zeros(len(memory), dtype=np.int64)
    for size_bytes, devices in zip(used, homes, strict=True):
        on_device[list(devices)] += size_bytes
    sources = sorted({device for devices in homes for device in devices})
    # By round, and within a round in the order of the copied devices.
    rounds = list(zip(*copies(on_device, sources, memory), strict=True))
    replicas = [pair for chosen in rounds for pair in zip(chosen, sources, strict=True)]
    return tuple(
        (*devices, *(copy for copy, source in replicas if source in devices)) for devices in homes
    )
