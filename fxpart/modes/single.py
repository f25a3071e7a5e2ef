"""`single`: the whole model on one device."""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.errors import InfeasibleError
from fxpart.modes.infeasible import describe_devices, whole_model_bytes
from fxpart.modes.options import NoOptions
from fxpart.problem import Problem
from fxpart.sizes import show_bytes

__all__ = ["single", "single_device"]


def single_device(problem: Problem) -> Assignment | None:
    """Return everything on the device with the most memory (the first such), or None if too much.

    Where the graph has operators that must run on one device, this is also where they all are.
    """
    sizes = problem.topology.memory_bytes
    device = int(np.argmax(sizes))
    if whole_model_bytes(problem) > sizes[device]:
        return None
    return Assignment(np.zeros(problem.graph.n_ops, dtype=np.int64), ((device,),))


def single(problem: Problem, _: NoOptions | None = None) -> Assignment:
    """Return everything on the device with the most memory.

    Raises:
        InfeasibleError: when that device is too small.

    """
    found = single_device(problem)
    if found is None:
        memory = [device.memory_bytes for device in problem.topology.devices]
        needed = whole_model_bytes(problem)
        raise InfeasibleError(
            f"single: the model needs {show_bytes(needed)} ({needed} bytes), the largest of the"
            f" devices {describe_devices(memory)} has {show_bytes(max(memory))};"
            " take a larger device, or mode=size_based or mode=kl_based over several",
            needed_bytes=needed,
            available_bytes=max(memory),
        )
    return found
