"""What one candidate costs in the exact readings of torch's searches, and the plan of the last one.

Torch maps all partitions to devices anew for each candidate, then walks the paths over partitions.
So does this, on arrays: partitions in their order, each to the device with the least memory left
that has more left than the partition adds (``get_device_to_partitions_mapping`` of
``torch.fx.experimental.accelerator_partitioner``). A partition adds what it needs, less what it
reads from partitions on that device. That is never too little, so what is mapped fits.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.cost import path_over_partitions_s
from fxpart.static.device_map import tightest
from fxpart.static.graph import StaticPlan
from fxpart.static.placing import placing_of
from fxpart.static.rows import grouped
from fxpart.static.tables import Tables

__all__ = ["candidate_s", "homes_as_torch", "plan_of"]


@compiled
def homes_as_torch(
    tables: Tables, memory: IntArray, part: IntArray, count: int
) -> tuple[bool, IntArray]:
    """Return whether each partition finds a device, and the device of each. O(reads + count * D).

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        part: partition of each operator, 0 to count - 1; one may be empty. Shape (n,).
        count: number of partitions.

    """
    used = placing_of(tables, part, count).used
    start, ops = grouped(part, count)
    home, added = np.full(count, -1, dtype=np.int64), np.empty_like(memory)
    left, ranking = memory.copy(), np.arange(memory.shape[0])
    for here in range(count):
        added[:] = used[here]
        for j in range(start[here], start[here + 1]):
            for i in range(tables.read_start[ops[j]], tables.read_start[ops[j] + 1]):
                maker = tables.reads[i]
                # A home of -1 is that of this partition or of a later one.
                if home[part[maker]] >= 0:
                    added[home[part[maker]]] -= tables.output[maker]
        home[here] = tightest(ranking, left, added, 1)
        if home[here] < 0:
            return False, home
        left[home[here]] -= added[home[here]]
    return True, home


@compiled
def candidate_s(tables: Tables, memory: IntArray, part: IntArray, count: int) -> float:
    """Return the latency of these partitions on the devices that torch would choose.

    Infinite when one finds no device, or when they wait for each other in a circle.
    Arguments as in `homes_as_torch`.
    """
    found, home = homes_as_torch(tables, memory, part, count)
    if not found:
        return np.inf
    longest_s = path_over_partitions_s(tables, part, count, home)
    return longest_s if longest_s >= 0 else np.inf


def plan_of(part: IntArray, home: IntArray) -> StaticPlan:
    """Return the plan of these partitions, without the empty ones.

    Args:
        part: partition of each operator. Shape (n,).
        home: device of each partition. Shape (P,).

    """
    kept, number = np.unique(part, return_inverse=True)
    return StaticPlan(number.astype(np.int64), tuple((int(device),) for device in home[kept]))
