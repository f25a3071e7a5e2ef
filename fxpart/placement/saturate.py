"""Replicate a whole placement on idle devices, as often as it fits, for round-robin inputs.

The rule is that of `saturate_host` in torch's partitioner
(`torch.fx.experimental.accelerator_partitioner`), with liveness memory instead of static memory.
"""

from fxpart.core.assignment import MOST_ROUNDS, Assignment
from fxpart.core.replicate import copies
from fxpart.cost.holding import holding
from fxpart.cost.problem import Problem

__all__ = ["saturate"]


def saturate(problem: Problem, assignment: Assignment) -> Assignment:
    """Return `assignment` with every used device replicated on idle ones, as often as it fits.

    In each round, each used device gets the smallest idle device with enough memory, the first
    among equals; a round counts only if every device finds one. A copy may be on another, slower
    kind of device, which limits the throughput on its turns. Partitions stay the same and only gain
    devices. Input i runs on copy i modulo their count, so an input never crosses between copies.
    """
    sizes = problem.topology.memory_bytes
    needed_bytes = holding(problem.memory, assignment, len(sizes)).peak_bytes
    used = sorted({device for homes in assignment.devices_of_partition for device in homes})
    most_copies = MOST_ROUNDS // assignment.rounds - 1
    copies_of = dict(zip(used, copies(needed_bytes, used, sizes, most_copies), strict=True))
    homes = tuple(
        # Copies of one device are adjacent, which keeps the turns of all partitions in step.
        tuple(copy for device in devices for copy in (device, *copies_of[device]))
        for devices in assignment.devices_of_partition
    )
    return Assignment(assignment.partition_of, homes)
