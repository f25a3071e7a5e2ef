"""`aot_based`: a placement that was decided ahead of time, taken as it is and costed here.

It comes from the `assignment.json` of a run, perhaps on other devices, or from a device for each
module. Nothing is moved: what does not fit is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.holding import holding
from fxpart.errors import InfeasibleError, SpecError, nearest_names
from fxpart.granularity import checks
from fxpart.graph import IntArray, OpGraph
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem
from fxpart.saved_assignment import assignment_for, assignment_path, read_assignment
from fxpart.sizes import show_bytes
from fxpart.topology import Topology
from fxpart.valid_assignment import in_valid_order, refuse_torn_groups

__all__ = ["AotBasedOptions", "aot_based"]

THE_REST = ("", "*")
"""Module paths that cover every operator; the second can be written on a command line."""


@dataclass(frozen=True, slots=True)
class AotBasedOptions:
    """Where the placement comes from: one of `assignment` and `modules`."""

    assignment: str | None = None
    """An `assignment.json`, or the folder of the run that wrote it."""
    modules: Mapping[Any, Any] = field(default_factory=dict)
    """Module path to logical id. The longest path that an operator's module begins with decides;
    ``""`` or ``*`` is the rest."""
    devices: Mapping[Any, Any] = field(default_factory=dict)
    """Logical id in the file to logical id here; ids left out stay as they are."""

    def __post_init__(self) -> None:
        """Refuse options that say nothing, or two things, and a file that cannot be read."""
        for name in ("modules", "devices"):
            if not isinstance(getattr(self, name), Mapping):
                raise SpecError(f"mode.{name} must be a mapping, got {getattr(self, name)!r}")
        if self.assignment is not None and not isinstance(self.assignment, str):
            raise SpecError(f"mode.assignment must be a path, got {self.assignment!r}")
        if bool(self.assignment) == bool(self.modules):
            raise SpecError(
                f"mode=aot_based was given {'both' if self.modules else 'neither'} of"
                " mode.assignment=assignment.json and mode.modules={path: device}; give one"
            )
        if self.devices and not self.assignment:
            raise SpecError("mode.devices changes the devices of mode.assignment; give that too")
        ids = [("devices", device) for pair in self.devices.items() for device in pair]
        for name, device in [*ids, *(("modules", home) for home in self.modules.values())]:
            if type(device) is not int or device < 0:  # True is an int to Python
                raise SpecError(
                    f"mode.{name} must name devices by their logical ids 0, 1, 2, got {device!r}"
                )
        decimal = [path for path in self.modules if not isinstance(path, str | int)]
        if decimal:
            raise SpecError(
                f"mode.modules has the number {decimal[0]} for a path: 1.10 would be read as 1.1;"
                " put it in quotes, in a file such as conf/mode/mine.yaml"
            )
        if self.assignment:
            # What is wrong with the file is said before the model is captured.
            read_assignment(assignment_path(self.assignment))


def aot_based(problem: Problem, options: AotBasedOptions) -> Assignment:
    """Return the placement that `options` give for this model.

    Partitions of a file keep their ids where none reads from a later one, and their replicas.

    Raises:
        SpecError: when the placement is of another model, names a device or module that is not
            there, leaves operators out, or separates operators that must share a device.
        CycleError: when partitions wait for each other.
        InfeasibleError: when a device has too little memory for what it is given.

    """
    graph = problem.graph
    if options.assignment:
        saved = assignment_for(read_assignment(assignment_path(options.assignment)), graph)
        placed = _on_devices(saved, options, problem.topology)
        refuse_torn_groups(graph, placed)
        placed = in_valid_order(graph, placed)
    else:
        # A command line makes a number of the path of a child of a Sequential.
        modules = {str(path): int(device) for path, device in options.modules.items()}
        device_of = _device_by_module(graph, modules, problem.topology.n_devices)
        separate = Assignment(*_one_partition_each(device_of))
        refuse_torn_groups(graph, separate)
        placed = partition_by_device(graph, device_of)
    _refuse_overfull(problem, placed)
    return placed


def _on_devices(saved: Assignment, options: AotBasedOptions, topology: Topology) -> Assignment:
    """Return the saved placement with the ids of its devices changed as asked."""
    known = {device for homes in saved.devices_of_partition for device in homes}
    strange = sorted(device for device in options.devices if device not in known)
    if strange:
        used = ", ".join(map(str, sorted(known)))
        raise SpecError(
            f"mode.devices names device {strange[0]}, {options.assignment} uses {used}; name those"
        )
    homes = []
    for partition, devices in enumerate(saved.devices_of_partition):
        mapped = [int(options.devices.get(device, device)) for device in devices]
        for before, after in zip(devices, mapped, strict=True):
            if after >= topology.n_devices:
                raise SpecError(
                    f"partition {partition} is on device {after}, there are {topology.n_devices},"
                    f" numbered from 0; take more devices, or map it: mode.devices={{{before}: 0}}"
                )
        # Two replicas on one device are one.
        homes.append(tuple(dict.fromkeys(mapped)))
    return Assignment(saved.partition_of, tuple(homes))


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
    of_checks = checks(graph)
    for op in range(graph.n_ops):
        # The check of a result goes with the result, whichever module it stands in.
        device_of[op] = _home(graph, int(graph.group[op]) if of_checks[op] else op, home_of)
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
    return () if path in THE_REST else tuple(path.split("."))


def _one_partition_each(device_of: IntArray) -> tuple[IntArray, tuple[tuple[int, ...], ...]]:
    """Return a partition for each device in use, whatever they read from each other."""
    devices, partition_of = np.unique(device_of, return_inverse=True)
    return partition_of.astype(np.int64), tuple((int(device),) for device in devices)


def _refuse_overfull(problem: Problem, placed: Assignment) -> None:
    sizes = problem.topology.memory_bytes
    needed = holding(problem.memory, placed, len(sizes)).peak_bytes
    over = np.flatnonzero(needed > sizes)
    if not len(over):
        return
    worst = int(over[np.argmax(needed[over] - sizes[over])])
    more = f", as have {len(over) - 1} others" if len(over) > 1 else ""
    need, have = int(needed[worst]), int(sizes[worst])
    raise InfeasibleError(
        f"aot_based: device {worst} ({problem.topology.devices[worst].name}) needs"
        f" {show_bytes(need)} ({need} bytes) for its partitions and has {show_bytes(have)} ({have}"
        f" bytes), too little{more}; move some of them, take larger devices, or let"
        " mode=size_based or mode=kl_based place the model",
        needed_bytes=need,
        available_bytes=have,
    )
