"""Export an offloading plan as a `device_map`: a device, ``cpu`` or ``disk`` for each module."""

from collections.abc import Mapping, Sequence

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.plan_export.device_map import device_map

__all__ = ["tiered_device_map"]


def tiered_device_map(
    graph: OpGraph, device_of: IntArray, tier_of: Mapping[int, str], names: Sequence[str] = ()
) -> dict[str, int | str]:
    """Return the entries of the device map closest to a plan.

    ``dispatch_model(model, entries, main_device=..., offload_dir=...)`` copies modules on ``cpu``
    or ``disk`` to the main device while they run.

    Args:
        graph: the captured model.
        device_of: planned device of each operator. Length n.
        tier_of: ``cpu`` or ``disk`` for operators with offloaded weights.
        names: ``list(model.state_dict())``, as for `device_map`.

    """
    tiers = ("cpu", "disk")
    devices = int(device_of.max(initial=0)) + 1
    place_of = device_of.copy()
    for op, tier in tier_of.items():
        place_of[op] = devices + tiers.index(tier)
    # All operators of a group are placed with its first one.
    place_of = place_of[graph.group]
    numbered, index = np.unique(place_of, return_inverse=True)
    mapped = device_map(graph, partition_by_device(graph, index.astype(np.int64)), names)
    device_names: list[int | str] = [
        tiers[number - devices] if number >= devices else number for number in numbered.tolist()
    ]
    return {path: device_names[device] for path, device in mapped.entries.items()}
