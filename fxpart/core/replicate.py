"""Which idle devices copy which used ones, as often as the idle ones hold them.

The rule of ``Partitioner.saturate_host`` in ``torch.fx.experimental.accelerator_partitioner``: in
each round every used device gets the smallest idle device that holds what lies on it, of equal ones
the first; a round in which one finds none changes nothing and is the last. What "lies on it" means
is the caller's: bytes that are never freed, or the peak of live tensors.
"""

from bisect import bisect_left

import numpy as np

from fxpart.core.graph import IntArray

__all__ = ["Homes", "copies", "replicate"]

Homes = tuple[tuple[int, ...], ...]
"""Positions of the devices that hold each partition."""


def copies(
    needed_bytes: IntArray, used: list[int], memory_bytes: IntArray, most: int | None = None
) -> list[list[int]]:
    """Return the devices that copy each of `used`, one of each round, in order of the rounds.

    All used devices get equally many. O(used x devices).

    Args:
        needed_bytes: bytes that lie on each device. Shape (D,).
        used: positions of the devices that are copied, in the order in which they choose.
        memory_bytes: bytes that each device has. Shape (D,).
        most: number of rounds after which to stop; without it, as many as there are.

    """
    taken = set(used)
    idle = sorted(
        (int(size), device) for device, size in enumerate(memory_bytes) if device not in taken
    )
    copies_of: list[list[int]] = [[] for _ in used]
    while used and len(idle) >= len(used) and (most is None or len(copies_of[0]) < most):
        chosen = []
        for device in used:
            place = bisect_left(idle, (int(needed_bytes[device]), -1))
            if place == len(idle):
                return copies_of
            chosen.append(idle.pop(place)[1])
        for copy_list, copy in zip(copies_of, chosen, strict=True):
            copy_list.append(copy)
    return copies_of


def replicate(used: IntArray, homes: Homes, memory: IntArray) -> Homes:
    """Return the devices of each partition, those that copy its devices added at the end.

    What a device holds counts as the sum of its partitions.

    Args:
        used: bytes of each partition. Shape (P,).
        homes: positions of the devices that hold each partition. Length P.
        memory: bytes of each device. Shape (D,).

    """
    on_device = np.zeros(len(memory), dtype=np.int64)
    for taken, devices in zip(used, homes, strict=True):
        on_device[list(devices)] += taken
    sources = sorted({device for devices in homes for device in devices})
    # Round by round, and within a round in order of the devices that are copied.
    rounds = list(zip(*copies(on_device, sources, memory), strict=True))
    made = [pair for chosen in rounds for pair in zip(chosen, sources, strict=True)]
    return tuple(
        (*devices, *(copy for copy, source in made if source in devices)) for devices in homes
    )
