"""`custom`: a placement from a user-defined function, validated."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError
from fxpart.placement.aot_based import in_valid_order, refuse_overfull, refuse_torn_groups

__all__ = ["CustomOptions", "custom"]


@dataclass(frozen=True)
class CustomOptions:
    """The user's function and its additional arguments."""

    function: Callable[..., object] | None = None
    """Takes a `Problem` and `args`; returns an `Assignment`, or the logical id of the device of
    each operator, in the graph's order."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Additional keyword arguments of the function."""

    def __post_init__(self) -> None:
        """Check that the function is callable and the arguments are a mapping."""
        if not callable(self.function):
            raise SpecError(
                "mode=custom needs a function of a problem that returns a device for each operator,"
                f" got mode.function={self.function!r}; give mode.function=package.module:function"
            )
        if not isinstance(self.args, Mapping):
            raise SpecError(f"mode.args must be a mapping, got {self.args!r}")


def custom(problem: Problem, options: CustomOptions) -> Assignment:
    """Return the validated placement made by the function in `options`.

    Raises:
        SpecError: if the result is not a placement of this model on these devices.
        CycleError: if its partitions wait for each other.
        InfeasibleError: if a device has too little memory.

    """
    assert options.function is not None, "options without a function are refused"
    result = options.function(problem, **options.args)
    if isinstance(result, Assignment):
        _check_devices(problem, result.partition_of, result.devices_of_partition)
        refuse_torn_groups(problem.graph, result)
        placed = in_valid_order(problem.graph, result)
    else:
        device_of = _device_ids(result)
        _check_devices(problem, device_of, [tuple(device_of.tolist())])
        partition_of = np.unique(device_of, return_inverse=True)[1].astype(np.int64)
        homes = tuple((int(device),) for device in np.unique(device_of))
        refuse_torn_groups(problem.graph, Assignment(partition_of, homes))
        placed = partition_by_device(problem.graph, device_of)
    refuse_overfull(problem, placed, "custom")
    return placed


def _device_ids(result: object) -> IntArray:
    """Return the function's result as a device for each operator."""
    try:
        device_of = np.asarray(result)
    except ValueError:  # rows of unequal length
        device_of = np.empty((0, 0))
    if device_of.ndim != 1 or device_of.dtype.kind not in "iu":
        raise SpecError(
            f"mode.function returned {_described(result)}; return an Assignment, or a list with the"
            " logical id of each operator's device"
        )
    return device_of.astype(np.int64)


def _described(result: object) -> str:
    kind = type(result).__name__
    if isinstance(result, list | tuple) and result:
        return f"a {kind} that begins with {type(result[0]).__name__}"
    return f"{kind} of {result.dtype}" if isinstance(result, np.ndarray) else kind


def _check_devices(
    problem: Problem, placed: IntArray, devices_of: Iterable[tuple[int, ...]]
) -> None:
    """Refuse a placement with the wrong number of operators, or on devices that do not exist."""
    count, n_devices = problem.graph.n_ops, problem.topology.n_devices
    if len(placed) != count:
        raise SpecError(
            f"mode.function placed {len(placed)} operators, the model has {count}; give each a"
            " device"
        )
    for homes in devices_of:
        wrong = [device for device in homes if not 0 <= device < n_devices]
        if wrong:
            raise SpecError(
                f"mode.function uses device {wrong[0]}, there are {n_devices}, numbered from 0;"
                " name one of them"
            )
