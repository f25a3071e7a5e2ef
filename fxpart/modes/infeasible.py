"""What to say when a model does not fit: needed bytes, present bytes, and how many would do."""

from itertools import groupby

import numpy as np

from fxpart.cost.kernels import peak_on_device
from fxpart.errors import InfeasibleError
from fxpart.modes.fill import fill_in_order
from fxpart.modes.units import atomic_units
from fxpart.problem import Problem
from fxpart.sizes import show_bytes

__all__ = ["describe_devices", "does_not_fit", "whole_model_bytes"]

_MOST_DEVICES = 1024


def whole_model_bytes(problem: Problem) -> int:
    """Return the peak bytes of the whole model on one device."""
    n = problem.graph.n_ops
    everywhere = np.zeros(n, dtype=np.int64)
    change = np.empty(n + 1, dtype=np.int64)
    return int(peak_on_device(problem.memory, everywhere, 0, change))


def describe_devices(memory_bytes: list[int]) -> str:
    """Return such as ``2 x 80.00 GB + 4 x 16.00 GB = 224.00 GB``."""
    runs = [(len(list(run)), size) for size, run in groupby(memory_bytes)]
    parts = " + ".join(f"{count} x {show_bytes(size)}" for count, size in runs)
    return f"{parts} = {show_bytes(sum(memory_bytes))}"


def does_not_fit(problem: Problem) -> InfeasibleError:
    """Return the error that says what is needed, what there is, and what would be enough."""
    memory = [device.memory_bytes for device in problem.topology.devices]
    needed, have = whole_model_bytes(problem), sum(memory)
    enough = _devices_that_fit(problem, memory)
    weights = problem.graph.total_weight_bytes
    wanted = f"the model needs {show_bytes(needed)} ({needed} bytes, weights {show_bytes(weights)})"
    each = show_bytes(memory[-1])
    if enough is None:
        change = f"one operator alone needs more than {each}: take larger devices"
    elif len(set(memory)) == 1:
        change = f"the smallest number of such devices that holds it is {enough}"
    else:
        change = f"{enough} devices of {each} would hold it"
    return InfeasibleError(
        f"{wanted}, the devices have {describe_devices(memory)} ({have} bytes); {change}",
        needed_bytes=needed,
        available_bytes=have,
        devices_that_fit=enough,
    )


def _devices_that_fit(problem: Problem, memory: list[int]) -> int | None:
    """Return the smallest number of devices that hold the model, filled in graph order.

    Of equal devices that many; of unequal ones, how many of the last kind alone.
    """
    _, used, left = fill_in_order(
        problem.memory, atomic_units(problem.graph), [memory[-1]] * _MOST_DEVICES
    )
    return None if left else used
