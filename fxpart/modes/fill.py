"""Fill devices one after the other in graph order: the start of `size_based`."""

from collections.abc import Callable, Sequence

import numpy as np

from fxpart.cost.kernels import peak_on_device
from fxpart.cost.tables import MemoryTables
from fxpart.graph import IntArray
from fxpart.modes.units import Units

__all__ = ["UNPLACED", "fill_in_order"]

UNPLACED = -1


def fill_in_order(
    memory: MemoryTables, units: Units, capacity_bytes: Sequence[int]
) -> tuple[IntArray, int, int]:
    """Return (device of each operator, devices opened, units left over).

    `units` are stretches of the graph's order (`contiguous_units`). Each device takes the longest
    run of them, from the first that no device has yet, whose liveness peak it can hold. All that a
    run reads from before it stays received however long the run, so a longer one never needs less
    memory, and it is found by doubling and halving. (In a training step it can need less, in rare
    cases: then a run that fits is taken, of which a longer one may fit too.) A device that cannot
    hold the next unit stays empty. Operators of units left over are `UNPLACED`.
    """
    start, ops = units
    count = len(start) - 1
    device_of = np.full(len(ops), UNPLACED, dtype=np.int64)
    change = np.empty(len(ops) + 1, dtype=np.int64)
    done, opened = 0, 0
    for device, capacity in enumerate(capacity_bytes):
        if done == count:
            break

        def holds(end: int, first: int = done, device: int = device, most: int = capacity) -> bool:
            mine, rest = ops[start[first] : start[end]], ops[start[end] :]
            device_of[mine], device_of[rest] = device, UNPLACED
            return int(peak_on_device(memory, device_of, device, change)) <= most

        end = _longest(holds, done, count)
        holds(end)
        opened = device + 1 if end > done else opened
        done = end
    return device_of, opened, count - done


def _longest(holds: Callable[[int], bool], first: int, count: int) -> int:
    """Return the greatest end for which `holds` is true, given that it holds up to some point."""
    good, step = first, 1
    while good < count and holds(min(good + step, count)):
        good = min(good + step, count)
        step *= 2
    bad = min(good + step, count + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good
