"""Copy a whole placement onto idle devices, as often as it fits, so that inputs take turns.

The rule is that of `saturate_host` in torch's partitioner
(`torch.fx.experimental.accelerator_partitioner`), with liveness memory in place of static memory.
"""

from fxpart.assignment import MOST_ROUNDS, Assignment
from fxpart.cost.holding import holding
from fxpart.problem import Problem

__all__ = ["saturate"]


def saturate(problem: Problem, assignment: Assignment) -> Assignment:
    """Return `assignment` with every used device copied onto idle ones, as often as they hold it.

    In a round, each used device gets the smallest idle device that has room for its bytes, of
    several the first; a round counts only if every device finds one. An idle device of another
    kind will do: it may be slower, and the stream of inputs is then as slow as its turns make it.
    Partitions stay as they are; only the devices that hold them grow. Input i runs on copy number i
    modulo their count, so one input never crosses from one copy to another.
    """
    sizes = [device.memory_bytes for device in problem.topology.devices]
    needed = holding(problem.memory, assignment, len(sizes)).peak_bytes
    used = sorted({device for homes in assignment.devices_of_partition for device in homes})
    idle = sorted(set(range(len(sizes))) - set(used), key=lambda device: (sizes[device], device))
    copies: dict[int, list[int]] = {device: [device] for device in used}
    count = 1
    while (count + 1) * assignment.rounds <= MOST_ROUNDS:
        found = _one_round({device: int(needed[device]) for device in used}, idle, sizes)
        if found is None:
            break
        for device, copy in found.items():
            copies[device].append(copy)
        idle = [device for device in idle if device not in found.values()]
        count += 1
    homes = tuple(
        # Copies of one device follow each other: so the turns of all partitions keep in step.
        tuple(copy for device in devices for copy in copies[device])
        for devices in assignment.devices_of_partition
    )
    return Assignment(assignment.partition_of, homes)


def _one_round(
    needed_bytes: dict[int, int], idle: list[int], sizes: list[int]
) -> dict[int, int] | None:
    """Return an idle device for each used one, None if one finds none; `idle` smallest first."""
    left = list(idle)
    found: dict[int, int] = {}
    for device, needed in needed_bytes.items():
        place = next((other for other in left if sizes[other] >= needed), None)
        if place is None:
            return None
        left.remove(place)
        found[device] = place
    return found
