"""The placement that a device for each module means."""

from collections.abc import Mapping

import numpy as np

from fxpart.assignment import Assignment
from fxpart.errors import SpecError, nearest_names
from fxpart.graph import IntArray, OpGraph
from fxpart.partitions import partition_by_device
from fxpart.valid_assignment import refuse_torn_groups

__all__ = ["placed_by_modules"]

_THE_REST = ("", "*")
"""Module paths that cover every operator; the second can be written on a command line."""


def placed_by_modules(graph: OpGraph, modules: Mapping[str, int], devices: int) -> Assignment:
    """Return each operator on the device of the longest path that covers its module.

    Raises:
        SpecError: when a module or one of the `devices` is not there, an operator has no device, or
            operators that must share one would not.

    """
    device_of = _device_by_module(graph, modules, devices)
    refuse_torn_groups(graph, Assignment(*_one_partition_each(device_of)))
    return partition_by_device(graph, device_of)


def _device_by_module(graph: OpGraph, modules: Mapping[str, int], devices: int) -> IntArray:
    """Return the device of each operator by the longest path that covers its module."""
    home_of = {_parts(path): device for path, device in modules.items()}
    for path, device in modules.items():
        if device >= devices:
            raise SpecError(
                f"mode.modules puts {path or 'the rest'} on device {device}, there are {devices},"
                " numbered from 0; name one of them"
            )
    prefixes = {_parts(m)[:end] for m in graph.modules for end in range(len(_parts(m)) + 1)}
    absent = [path for path in modules if _parts(path) not in prefixes]
    if absent:
        near = nearest_names(absent[0], (".".join(parts) for parts in prefixes if parts))
        raise SpecError(f"mode.modules names {absent[0]}, which the model does not have; {near}")
    device_of = np.empty(graph.n_ops, dtype=np.int64)
    is_check = graph.is_check
    for op in range(graph.n_ops):
        # The check of a result goes with the result, whichever module it stands in.
        device_of[op] = _home(graph, int(graph.group[op]) if is_check[op] else op, home_of)
    return device_of


def _home(graph: OpGraph, op: int, home_of: Mapping[tuple[str, ...], int]) -> int:
    """Return the device of the longest path that covers the operator's module."""
    parts = _parts(graph.modules[op])
    covers = (parts[:end] for end in range(len(parts), -1, -1))
    home = next((home_of[path] for path in covers if path in home_of), None)
    if home is None:
        known = [".".join(path) for path in home_of]
        near = nearest_names(graph.modules[op], known) if parts else "it belongs to no module"
        raise SpecError(
            f"mode.modules has no entry for operator {graph.names[op]} of"
            f" {graph.modules[op] or 'the model itself'}; {near}; add one, or *: 0 for the rest"
        )
    return home


def _parts(path: str) -> tuple[str, ...]:
    return () if path in _THE_REST else tuple(path.split("."))


def _one_partition_each(device_of: IntArray) -> tuple[IntArray, tuple[tuple[int, ...], ...]]:
    """Return a partition for each device in use, whatever they read from each other."""
    devices, partition_of = np.unique(device_of, return_inverse=True)
    return partition_of.astype(np.int64), tuple((int(device),) for device in devices)
