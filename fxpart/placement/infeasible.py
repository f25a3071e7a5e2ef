"""The error for a model that does not fit: bytes needed and available, devices that suffice."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.device_spec import MAX_DEVICES
from fxpart.core.graph import IntArray
from fxpart.core.topology import DeviceSpec
from fxpart.cost.kernels import peak_on_device
from fxpart.cost.peak_tensors import device_peaks
from fxpart.cost.problem import Problem
from fxpart.cost.storage_kinds import PLURALS
from fxpart.errors import InfeasibleError, show_bytes, show_unequal_bytes
from fxpart.placement.search.fill import UNPLACED, fill_in_order, place_all
from fxpart.placement.search.units import Units, contiguous_units

__all__ = [
    "describe_devices",
    "describe_reserve",
    "does_not_fit",
    "what_is_held",
    "whole_model_bytes",
]

_WORTH_A_WORD = 0.05
"""Smallest share of a peak for which a kind is mentioned."""


def whole_model_bytes(problem: Problem) -> int:
    """Return the peak bytes of the whole model on one device."""
    n = problem.graph.n_ops
    device_of = np.zeros(n, dtype=np.int64)
    change = np.empty(n + 1, dtype=np.int64)
    return int(peak_on_device(problem.memory, device_of, 0, change))


def describe_devices(memory_bytes: list[int]) -> str:
    """Describe devices as in ``2 x 80.00 GB + 4 x 16.00 GB = 224.00 GB`` or ``1 x 80.00 GB``."""
    runs = [(len(list(run)), size) for size, run in groupby(memory_bytes)]
    parts = " + ".join(f"{count} x {show_bytes(size)}" for count, size in runs)
    return parts if len(memory_bytes) == 1 else f"{parts} = {show_bytes(sum(memory_bytes))}"


def describe_reserve(devices: Sequence[DeviceSpec]) -> str:
    """Describe the reserve as in `` beside 604.00 MB reserved on each``; empty if there is none."""
    largest = max(device.reserved_bytes for device in devices)
    if not largest:
        return ""
    equal = all(device.reserved_bytes == largest for device in devices)
    on_each = " on each" if len(devices) > 1 else ""
    return f" beside {'' if equal else 'up to '}{show_bytes(largest)} reserved{on_each}"


def does_not_fit(problem: Problem) -> InfeasibleError:
    """Return an error with the memory needed, the memory available, and what would suffice.

    For use if `size_based` fails too, since sufficient devices are found by filling. For equal
    devices, it is the smallest number on which `size_based` fits the model; for unequal ones, the
    number of devices of the largest kind alone. This may take seconds, so it is computed when the
    message is read.
    """
    memory = [device.memory_bytes for device in problem.topology.devices]
    needed, have = whole_model_bytes(problem), sum(memory)

    def explanation() -> tuple[str, int | None]:
        enough, change = _what_would_do(problem, memory)
        return (
            f"the model needs {show_bytes(needed)} ({needed} bytes, {what_is_held(problem)}),"
            f" the devices have {describe_devices(memory)} ({have} bytes)"
            f"{describe_reserve(problem.topology.devices)}; {change}",
            enough,
        )

    return InfeasibleError(explanation, needed_bytes=needed, available_bytes=have)


def what_is_held(problem: Problem) -> str:
    """Describe the peak on one device as in ``weights 4.00 GB, saved activations 2.10 GB``.

    Kinds with a small share are left out.
    """
    n = problem.graph.n_ops
    alone = Assignment(np.zeros(n, dtype=np.int64), ((0,),))
    peak = device_peaks(problem, alone, 0)[0]
    return ", ".join(
        f"{PLURALS[kind]} {show_bytes(size)}"
        for kind, size in peak.by_kind.items()
        if kind == "weight" or size >= _WORTH_A_WORD * peak.bytes
    )


def _what_would_do(problem: Problem, memory: list[int]) -> tuple[int | None, str]:
    """Return the number of devices that would suffice (None if unknown), and a sentence on it."""
    largest, equal = max(memory), len(set(memory)) == 1
    units = contiguous_units(problem.graph)
    _, used, remaining_units = fill_in_order(problem.memory, units, [largest] * MAX_DEVICES)
    if remaining_units and used == MAX_DEVICES:
        return None, f"it takes more than {MAX_DEVICES} devices of {show_bytes(largest)}"
    if remaining_units:
        group, needed = _heaviest_group(problem, units, len(units[0]) - 1 - remaining_units)
        if needed > largest:
            return None, _too_large(problem, group, needed, largest, equal=equal)
        # Operators that do not fit in order may fit out of order.
        tried = range(len(memory) + 1, len(memory) + 9)
        sufficient = (n for n in tried if place_all(problem, [largest] * n) is not None)
        used = next(sufficient, 0)
        if not used:
            size_text = show_bytes(largest)
            return (
                None,
                f"it was not placed on up to {tried[-1]} devices of {size_text}: take larger ones",
            )
    # Filling in order is not optimal: fewer devices may suffice out of order.
    fewest = len(memory) + 1 if equal else 1
    while used > fewest and place_all(problem, [largest] * (used - 1)) is not None:
        used -= 1
    if equal:
        return used, f"the smallest number of such devices found to hold it is {used}"
    return used, f"{used} devices of {show_bytes(largest)} would hold it"


def _heaviest_group(problem: Problem, units: Units, unit: int) -> tuple[IntArray, int]:
    """Return the group of a unit that needs the most memory by itself, and its bytes."""
    start, ops = units
    change = np.empty(problem.graph.n_ops + 1, dtype=np.int64)
    stretch = ops[start[unit] : start[unit + 1]]
    groups = [
        np.flatnonzero(problem.graph.group == g) for g in np.unique(problem.graph.group[stretch])
    ]
    needs = []
    for group in groups:
        alone = np.full(problem.graph.n_ops, UNPLACED, dtype=np.int64)
        alone[group] = 0
        needs.append(int(peak_on_device(problem.memory, alone, 0, change)))
    heaviest = int(np.argmax(needs))
    return groups[heaviest].astype(np.int64), needs[heaviest]


def _too_large(problem: Problem, group: IntArray, needed: int, largest: int, *, equal: bool) -> str:
    """Describe a group of operators that exceeds the largest device."""
    name, module = problem.graph.names[int(group[0])], problem.graph.modules[int(group[0])]
    where = f"operator {name}" + (f" of {module}" if module else "")
    companions = f" and {len(group) - 1} that must stay with it" if len(group) > 1 else ""
    device_text = "a device" if equal else "the largest device"
    needs, has = show_unequal_bytes(needed, largest)
    return (
        f"{where}{companions} alone needs {needs}, {device_text} has {has}: take larger devices,"
        " or a smaller batch or sequence"
    )
