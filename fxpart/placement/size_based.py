"""`size_based`: fill devices one after the other in graph order, the fastest first.

The rule is that of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with
liveness memory instead of the sum of all tensors. Torch uses the device with the most memory if
that holds everything, and otherwise the devices in the given order, however slow. Here the fastest
come first, and a device that makes the plan slower is left empty, so adding a device never hurts.
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
"""Most subsets of devices that are tried; fewer for large models."""
_OPERATORS_FILLED = 300_000
"""Most operators placed over all subsets, which takes several seconds."""


@fastest_first
def size_based(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Place the model on one device, or fill several in order, whichever is faster.

    The single device is the fastest that holds everything; filling starts with the fastest. If
    operators remain after all devices, each goes to the device with the least free memory on which
    it fits. Devices stay empty if the latency is lower without them.

    Raises:
        InfeasibleError: if an operator fits nowhere.

    """
    whole = single_device(problem)
    candidates = [] if whole is None else [whole.device_of]
    candidates += _fillings(problem)
    if not candidates:
        raise does_not_fit(problem)
    log = schedule_log(problem.costs)
    # Ties go to the first, so to one device rather than several.
    fastest = min(candidates, key=lambda device_of: schedule(problem.costs, device_of, log)[0])
    return partition_by_device(problem.graph, fastest)


def _fillings(problem: Problem) -> list[IntArray]:
    """Return the feasible placements by filling all devices or subsets of them."""
    placed: list[IntArray] = []

    def filled(devices: IntArray) -> IntArray | None:
        device_of = place_all(problem, problem.topology.memory_bytes[devices].tolist())
        if device_of is None:
            return None
        placed.append(devices[device_of])
        return placed[-1]

    most_fills = max(1, min(_MOST_FILLS, _OPERATORS_FILLED // problem.graph.n_ops))
    choices_of_devices(problem, filled, most_fills)
    return placed
