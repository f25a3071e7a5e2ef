"""`size_based`: fill one device after the other, the fastest first, in graph order.

The rule is that of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with
liveness memory in place of the sum of all tensors. Torch takes the device with the most memory if
that holds all, and else goes through devices as they are given, however slow those are. Here the
fastest come first, and a device that makes the plan slower is left out: so a further one never
does.
"""

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.placement.device_order import choices_of_devices, fastest_first
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.options import NoOptions
from fxpart.placement.search.fill import place_all
from fxpart.placement.single import single_device

__all__ = ["size_based"]

_MOST_FILLS = 64
"""Choices of devices that are filled, at most; of large models fewer."""
_OPERATORS_FILLED = 300_000
"""Operators that are placed in all of them together, at most: some seconds."""


@fastest_first
def size_based(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return the model on one device, or filled over several in order: what takes less time.

    On the fastest device that holds all, or on the fastest first. When the devices run out,
    operators left over go one by one to the device with the least memory left that still holds
    them. Devices without which the latency is lower stay empty.

    Raises:
        InfeasibleError: when an operator fits nowhere.

    """
    whole = single_device(problem)
    placed = [] if whole is None else [whole.device_of]
    placed += _fillings(problem)
    if not placed:
        raise does_not_fit(problem)
    log = schedule_log(problem.costs)
    # The first of equals: on one device rather than on several.
    least = min(placed, key=lambda device_of: schedule(problem.costs, device_of, log)[0])
    return partition_by_device(problem.graph, least)


def _fillings(problem: Problem) -> list[IntArray]:
    """Return the placements by filling all devices, or all but some, as far as they fit."""
    placed: list[IntArray] = []

    def filled(devices: IntArray) -> IntArray | None:
        device_of = place_all(problem, problem.topology.memory_bytes[devices].tolist())
        if device_of is None:
            return None
        placed.append(devices[device_of])
        return placed[-1]

    most = max(1, min(_MOST_FILLS, _OPERATORS_FILLED // problem.graph.n_ops))
    choices_of_devices(problem, filled, most)
    return placed
