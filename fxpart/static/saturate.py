"""Copy all used devices onto idle ones, as often as the idle ones hold them.

The rule of ``Partitioner.saturate_host`` in ``torch.fx.experimental.accelerator_partitioner``: in
each round every used device gets the smallest idle device that holds what lies on it; a round in
which one finds none changes nothing and is the last.
"""

import numpy as np

from fxpart.graph import IntArray
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.memory import used_bytes

__all__ = ["replicate", "saturate"]

Homes = tuple[tuple[int, ...], ...]


def _round(needed: list[int], idle: list[int], memory: IntArray) -> list[int] | None:
    """Return an idle device for each number of bytes, or None when one finds none."""
    free = list(idle)
    chosen = []
    for most in needed:
        fitting = [d for d in free if memory[d] >= most]
        if not fitting:
            return None
        device = min(fitting, key=lambda d: int(memory[d]))
        free.remove(device)
        chosen.append(device)
    return chosen


def replicate(used: IntArray, homes: Homes, memory: IntArray) -> Homes:
    """Return the devices of each partition, those that replicate its device added at the end.

    Args:
        used: bytes of each partition. Shape (P,).
        homes: positions of the devices that hold each partition. Length P.
        memory: bytes of each device. Shape (D,).

    """
    on_device = np.zeros(len(memory), dtype=np.int64)
    for taken, devices in zip(used, homes, strict=True):
        on_device[list(devices)] += taken
    holding = {device for devices in homes for device in devices}
    sources = [d for d in range(len(memory)) if d in holding]
    idle = [d for d in range(len(memory)) if d not in holding]
    needed = [int(on_device[d]) for d in sources]
    made: list[tuple[int, int]] = []
    while len(idle) >= len(sources) > 0:
        chosen = _round(needed, idle, memory)
        if chosen is None:
            break
        made.extend(zip(chosen, sources, strict=True))
        taken_now = set(chosen)
        idle = [d for d in idle if d not in taken_now]
    return tuple(
        (*devices, *(copy for copy, source in made if source in devices)) for devices in homes
    )


def saturate(problem: StaticProblem, plan: StaticPlan) -> StaticPlan:
    """Return `plan` with its used devices replicated onto idle ones that hold them.

    Only the devices of partitions grow. What a device holds counts as the sum of its partitions.
    """
    count = len(plan.devices_of_partition)
    used = used_bytes(problem.graph, plan.partition_of, count)
    homes = replicate(used, plan.devices_of_partition, problem.memory_bytes)
    return StaticPlan(plan.partition_of, homes)
