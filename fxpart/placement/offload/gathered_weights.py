"""Weights of a training step that lie in the host's memory, as in DeepSpeed's ZeRO-Infinity.

A block's weights are copied to a device when the forward comes to it, and again for the backward;
the next block's are copied meanwhile. What updates them on the host leaves them there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.cost.streams import Copy, Source
from fxpart.placement.offload.units import weight_uses

__all__ = ["WEIGHT_POOL", "Gathered", "gathered_copies", "gathered_of"]

WEIGHT_POOL = 1
"""Beside that of saved activations."""


class Gathered(NamedTuple):
    """Which weights are copied to devices."""

    unit_of: IntArray
    """The unit of each weight that is; -1 of others. Shape (W,)."""
    sizes: IntArray
    """Bytes of each weight. Shape (W,)."""


def gathered_of(graph: OpGraph, paths: Sequence[str]) -> Gathered:
    """Return the weights that only one of the units with these paths computes with.

    What two units share, such as tied embeddings, stays on the devices.
    """
    number = {path: index for index, path in enumerate(paths)}
    users, used = weight_uses(graph)
    of_op = np.array([number.get(block_of(m) or m, -1) for m in graph.modules], dtype=np.int64)
    units = of_op[users]
    least = np.full(len(graph.weight_names), len(paths), dtype=np.int64)
    most = np.full(len(graph.weight_names), -1, dtype=np.int64)
    np.minimum.at(least, used, units)
    np.maximum.at(most, used, units)
    return Gathered(np.where(least == most, most, -1), graph.weight_bytes)


def gathered_copies(
    graph: OpGraph, gathered: Gathered, device_of: IntArray, sources: Sequence[Source]
) -> list[Copy]:
    """Return the copies of units in the order in which they are needed.

    One lasts for as long as a device computes with no other unit, so that a block whose backward
    follows its forward is copied once. `sources` says where each unit lies.
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
        here = visits.setdefault(device, [])
        if not here or here[-1][0] != unit:
            here.append([unit, op, op])
        here[-1][2] = op
    copies = [
        Copy(unit, device, size[unit, device], first, last, sources[unit], pool=WEIGHT_POOL)
        for device, here in visits.items()
        for unit, first, last in here
    ]
    return sorted(copies, key=lambda copy: copy.first_op)
