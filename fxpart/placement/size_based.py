"""`size_based`: fill one device after the other, in graph order, by memory alone.

The rule is that of torch's partitioner (`torch.fx.experimental.accelerator_partitioner`), with
liveness memory in place of the sum of all tensors.
"""

from fxpart.core.assignment import Assignment
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.options import NoOptions
from fxpart.placement.search.fill import place_all
from fxpart.placement.single import single_device

__all__ = ["size_based"]


def size_based(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return the model on one device if it fits there, else filled over the devices in order.

    When the devices run out, operators left over go one by one to the device with the least
    memory left that still holds them.

    Raises:
        InfeasibleError: when an operator fits nowhere.

    """
    whole = single_device(problem)
    if whole is not None:
        return whole
    sizes = [device.memory_bytes for device in problem.topology.devices]
    device_of = place_all(problem, sizes)
    if device_of is None:
        raise does_not_fit(problem)
    return partition_by_device(problem.graph, device_of)
