"""A plan with tiers as accelerate's `device_map`: a device, ``cpu`` or ``disk`` for each module."""

from collections.abc import Mapping, Sequence

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.plan_export.device_map import device_map

__all__ = ["tiered_device_map"]


def tiered_device_map(
    graph: OpGraph, device_of: IntArray, tier_of: Mapping[int, str], names: Sequence[str] = ()
) -> dict[str, int | str]:
    """Return the entries of the map that is nearest to a plan.

    ``dispatch_model(model, entries, main_device=..., offload_dir=...)`` copies what is on ``cpu``
    or ``disk`` to the main device for as long as it runs.

    Args:
        graph: the captured model.
        device_of: planned device of each operator. Length n.
        tier_of: of operators whose weights lie in a tier, ``cpu`` or ``disk``.
        names: ``list(model.state_dict())``, as for `device_map`.

    """
    words = ("cpu", "disk")
    devices = int(device_of.max(initial=0)) + 1
    apart = device_of.copy()
    for op, word in tier_of.items():
        apart[op] = devices + words.index(word)
    # All operators of a group lie where its first one does.
    apart = apart[graph.group]
    numbered, place = np.unique(apart, return_inverse=True)
    mapped = device_map(graph, partition_by_device(graph, place.astype(np.int64)), names)
    named: list[int | str] = [
        words[number - devices] if number >= devices else number for number in numbered.tolist()
    ]
    return {path: named[device] for path, device in mapped.entries.items()}
