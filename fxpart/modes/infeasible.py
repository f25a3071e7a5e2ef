"""What to say when a model does not fit: needed bytes, present bytes, and how many would do."""

from itertools import groupby

import numpy as np

from fxpart.cost.kernels import peak_on_device
from fxpart.device_spec import MAX_DEVICES
from fxpart.errors import InfeasibleError
from fxpart.modes.fill import UNPLACED, fill_in_order
from fxpart.modes.leftovers import place_all
from fxpart.modes.units import Units, contiguous_units
from fxpart.problem import Problem
from fxpart.sizes import show_bytes

__all__ = ["describe_devices", "does_not_fit", "whole_model_bytes"]


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
    """Return the error that says what is needed, what there is, and what would be enough.

    Of equal devices: the smallest number that `size_based` fits the model on. Of unequal ones: how
    many of the largest kind alone.
    """
    memory = [device.memory_bytes for device in problem.topology.devices]
    needed, have, weights = (
        whole_model_bytes(problem),
        sum(memory),
        problem.graph.total_weight_bytes,
    )
    enough, change = _what_would_do(problem, memory)
    return InfeasibleError(
        f"the model needs {show_bytes(needed)} ({needed} bytes, weights {show_bytes(weights)}),"
        f" the devices have {describe_devices(memory)} ({have} bytes); {change}",
        needed_bytes=needed,
        available_bytes=have,
        devices_that_fit=enough,
    )


def _what_would_do(problem: Problem, memory: list[int]) -> tuple[int | None, str]:
    """Return how many devices would hold the model, None if no number, and that in words."""
    largest, equal = max(memory), len(set(memory)) == 1
    units = contiguous_units(problem.graph)
    _, used, left = fill_in_order(problem.memory, units, [largest] * MAX_DEVICES)
    if left and used == MAX_DEVICES:
        return None, f"it takes more than {MAX_DEVICES} devices of {show_bytes(largest)}"
    if left:
        return None, _too_large(problem, units, len(units[0]) - 1 - left, largest, equal)
    # Filling in order is not always tightest: fewer may do with operators out of order.
    fewest = len(memory) + 1 if equal else 1
    while used > fewest and place_all(problem, [largest] * (used - 1)) is not None:
        used -= 1
    if equal:
        return used, f"the smallest number of such devices found to hold it is {used}"
    return used, f"{used} devices of {show_bytes(largest)} would hold it"


def _too_large(problem: Problem, units: Units, unit: int, largest: int, equal: bool) -> str:
    """Return what to say of a unit that exceeds the largest device."""
    start, ops = units
    alone = np.full(problem.graph.n_ops, UNPLACED, dtype=np.int64)
    mine = ops[start[unit] : start[unit + 1]]
    alone[mine] = 0
    change = np.empty(len(alone) + 1, dtype=np.int64)
    needed = int(peak_on_device(problem.memory, alone, 0, change))
    name, module = problem.graph.names[int(mine[0])], problem.graph.modules[int(mine[0])]
    where = f"operator {name}" + (f" of {module}" if module else "")
    more = f" and {len(mine) - 1} that must stay with it" if len(mine) > 1 else ""
    each = "a device" if equal else "the largest device"
    return (
        f"{where}{more} alone needs {show_bytes(needed)}, {each} has {show_bytes(largest)}:"
        " take larger devices, or a smaller batch or sequence"
    )
