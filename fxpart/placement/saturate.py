"""Copy a whole placement onto idle devices, as often as it fits, so that inputs take turns.

The rule is that of `saturate_host` in torch's partitioner
(`torch.fx.experimental.accelerator_partitioner`), with liveness memory in place of static memory.
"""

from fxpart.core.assignment import MOST_ROUNDS, Assignment
from fxpart.core.replicate import copies
from fxpart.cost.holding import holding
from fxpart.cost.problem import Problem

__all__ = ["saturate"]


def saturate(problem: Problem, assignment: Assignment) -> Assignment:
    """Return `assignment` with every used device copied onto idle ones, as often as they hold it.

    In a round, each used device gets the smallest idle device that has room for its bytes, of
    several the first; a round counts only if every device finds one. An idle device of another
    kind will do: it may be slower, and the stream of inputs is then as slow as its turns make it.
    Partitions stay as they are; only the devices that hold them grow. Input i runs on copy number i
    modulo their count, so one input never crosses from one copy to another.
    """
    sizes = problem.topology.memory_bytes
    needed_bytes = holding(problem.memory, assignment, len(sizes)).peak_bytes
    used = sorted({device for homes in assignment.devices_of_partition for device in homes})
    most = MOST_ROUNDS // assignment.rounds - 1
    copies_of = dict(zip(used, copies(needed_bytes, used, sizes, most), strict=True))
    homes = tuple(
        # Copies of one device follow each other: so the turns of all partitions keep in step.
        tuple(copy for device in devices for copy in (device, *copies_of[device]))
        for devices in assignment.devices_of_partition
    )
    return Assignment(assignment.partition_of, homes)
