"""Weights of a training step in host memory, as in DeepSpeed's ZeRO-Infinity.

A block's weights are prefetched to a device for its forward, and again for its backward, while the
previous block runs. They are updated on the host and stay there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph, only_user
from fxpart.core.module_paths import block_of
from fxpart.cost.streams import Copy, Source
from fxpart.placement.offload.units import weight_uses

__all__ = ["WEIGHT_POOL", "Gathered", "gathered_copies", "gathered_of"]

WEIGHT_POOL = 1
"""Copy pool of weights, separate from that of saved activations."""


class Gathered(NamedTuple):
    """The weights that are copied to devices."""

    unit_of: IntArray
    """The unit of each copied weight; -1 for others. Shape (W,)."""
    sizes: IntArray
    """Bytes of each weight. Shape (W,)."""


def gathered_of(graph: OpGraph, paths: Sequence[str]) -> Gathered:
    """Return the weights used by exactly one of the units with these paths.

    Weights shared by several units, such as tied embeddings, stay on the devices.
    """
    number = {path: index for index, path in enumerate(paths)}
    users, used = weight_uses(graph)
    of_op = np.array([number.get(block_of(m) or m, -1) for m in graph.modules], dtype=np.int64)
    return Gathered(only_user(len(graph.weight_names), used, of_op[users]), graph.weight_bytes)


def gathered_copies(
    graph: OpGraph, gathered: Gathered, device_of: IntArray, sources: Sequence[Source]
) -> list[Copy]:
    """Return the copies of units in the order in which they are needed.

    A copy is live until the device uses another unit, so a block whose backward directly follows
    its forward is copied once. `sources` has the location of each unit.
    """
    users, weights = weight_uses(graph)
    is_gathered = gathered.unit_of[weights] >= 0
    users, weights = users[is_gathered], weights[is_gathered]
    units, devices = gathered.unit_of[weights], device_of[users]
    size: dict[tuple[int, int], int] = {}
    for unit, device, weight in sorted(
        set(zip(units.tolist(), devices.tolist(), weights.tolist(), strict=True))
    ):
        size[unit, device] = size.get((unit, device), 0) + int(gathered.sizes[weight])
    visits: dict[int, list[list[int]]] = {}
    for op, unit, device in sorted(
        zip(users.tolist(), units.tolist(), devices.tolist(), strict=True)
    ):
        device_visits = visits.setdefault(device, [])
        if not device_visits or device_visits[-1][0] != unit:
            device_visits.append([unit, op, op])
        device_visits[-1][2] = op
    copies = [
        Copy(unit, device, size[unit, device], first, last, sources[unit], pool=WEIGHT_POOL)
        for device, device_visits in visits.items()
        for unit, first, last in device_visits
    ]
    return sorted(copies, key=lambda copy: copy.first_op)
