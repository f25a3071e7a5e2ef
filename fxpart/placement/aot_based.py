"""`aot_based`: a placement decided ahead of time, used as it is.

It comes from the `assignment.json` of a run, possibly on other devices, or from a device for each
module. Nothing is moved: a placement that does not fit is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import (
    crossings,
    meetings,
    partition_by_device,
    partition_by_homes,
    partition_order,
    turns,
)
from fxpart.core.saved_assignment import (
    SavedAssignment,
    assignment_for,
    assignment_path,
    read_assignment,
)
from fxpart.core.topology import Topology
from fxpart.cost.holding import holding
from fxpart.cost.problem import Problem
from fxpart.errors import CycleError, InfeasibleError, SpecError, nearest_names, show_bytes
from fxpart.placement.infeasible import describe_reserve

__all__ = [
    "AotBasedOptions",
    "aot_based",
    "in_valid_order",
    "refuse_overfull",
    "refuse_torn_groups",
]


# Validate an assignment made elsewhere, and find an execution order of its partitions.


def refuse_torn_groups(graph: OpGraph, assignment: Assignment) -> None:
    """Raise `SpecError` if operators that must share a device do not, in any round."""
    homes = assignment.devices_of_partition
    for op in np.flatnonzero(graph.group != np.arange(graph.n_ops)).tolist():
        first = int(graph.group[op])
        home, away = (homes[int(assignment.partition_of[o])] for o in (first, op))
        if home != away:
            raise SpecError(
                f"operators {_named(graph, first)} and {_named(graph, op)} must share a device:"
                " one changes the other's result in place or takes a part of it, or granularity="
                f" keeps their modules whole; they are on {_listed(home)} and {_listed(away)};"
                " put both on one"
            )


def _named(graph: OpGraph, op: int) -> str:
    return graph.names[op] + (f" of {graph.modules[op]}" if graph.modules[op] else "")


def _listed(devices: tuple[int, ...]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


def in_valid_order(graph: OpGraph, assignment: Assignment) -> Assignment:
    """Renumber the partitions of an assignment into a valid execution order.

    No partition comes before one that it reads from, and for every input the operators of each
    device run in graph order, as `fxpart.cost.evaluate` simulates. The assignment is unchanged if
    this already holds. If partitions of one device interleave, no numbering works: then operators
    keep their devices, including replicas, but are partitioned anew.

    Raises:
        CycleError: if partitions wait for each other; the message shows one cycle.

    """
    parts, count = assignment.partition_of, assignment.n_partitions
    first_op = np.full(count, graph.n_ops, dtype=np.int64)
    np.minimum.at(first_op, parts, np.arange(graph.n_ops))
    reads = crossings(graph, parts)
    partition_order(count, reads, first_op.tolist())
    homes = tuple(dict.fromkeys(assignment.devices_of_partition))
    number_of = {devices: number for number, devices in enumerate(homes)}
    home_of = np.array([number_of[d] for d in assignment.devices_of_partition])[parts]
    edges = sorted({*reads, *turns(parts, home_of, meetings(homes))})
    if all(before < after for before, after in edges):
        return assignment
    try:
        order = partition_order(count, edges, first_op.tolist())
    except CycleError:
        return partition_by_homes(graph, home_of, homes)
    number = np.empty(count, dtype=np.int64)
    number[order] = np.arange(count)
    return Assignment(number[parts], tuple(assignment.devices_of_partition[p] for p in order))


# Apply an `assignment.json`, possibly to other devices than it was made for.


def _placed_by_file(
    graph: OpGraph, topology: Topology, saved: SavedAssignment, devices: Mapping[int, int]
) -> Assignment:
    """Return the saved placement with device ids mapped by `devices`.

    Partitions keep their ids if these are a valid execution order, and always their replicas.

    Raises:
        SpecError: if it is for another model, a device does not exist, or operators that must share
            a device do not.
        CycleError: if partitions wait for each other.

    """
    placed = _on_devices(assignment_for(saved, graph), devices, topology, saved.devices)
    refuse_torn_groups(graph, placed)
    return in_valid_order(graph, placed)


def _on_devices(
    saved: Assignment,
    changed: Mapping[int, int],
    topology: Topology,
    saved_devices: Sequence[Mapping[str, object]],
) -> Assignment:
    """Return the saved placement with device ids mapped by `changed`."""
    known = {device for homes in saved.devices_of_partition for device in homes}
    unknown = sorted(device for device in changed if device not in known)
    if unknown:
        used = ", ".join(map(str, sorted(known)))
        raise SpecError(
            f"mode.devices names device {unknown[0]}, the saved assignment uses {used}; name those"
        )
    homes = []
    for partition, devices in enumerate(saved.devices_of_partition):
        mapped = [int(changed.get(device, device)) for device in devices]
        for before, after in zip(devices, mapped, strict=True):
            if before not in changed and saved_devices[before].get("is_tier"):
                raise SpecError(
                    f"the saved plan computes modules on {saved_devices[before]['name']}, and"
                    " mode=aot_based does not cost plans with modules on the host again; use the"
                    f" mode that made it, or put them on a device: mode.devices={{{before}: 0}}"
                )
            if after >= topology.n_devices:
                raise SpecError(
                    f"partition {partition} is on device {after}, there are {topology.n_devices},"
                    f" numbered from 0; take more devices, or map it: mode.devices={{{before}: 0}}"
                )
        # Replicas mapped to the same device are merged.
        homes.append(tuple(dict.fromkeys(mapped)))
    return Assignment(saved.partition_of, tuple(homes))


# Apply a device for each module.

_THE_REST = ("", "*")
"""Module paths that cover every operator; the second is usable on a command line."""


def _placed_by_modules(graph: OpGraph, modules: Mapping[str, int], devices: int) -> Assignment:
    """Place each operator on the device of the longest path that covers its module.

    Raises:
        SpecError: if a module or device does not exist, an operator has no device, or operators
            that must share a device do not.

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
        # A check goes with the result that it checks, regardless of its module.
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
    """Return one partition per device in use, regardless of dependencies."""
    devices, partition_of = np.unique(device_of, return_inverse=True)
    return partition_of.astype(np.int64), tuple((int(device),) for device in devices)


@dataclass(frozen=True)
class AotBasedOptions:
    """Source of the placement: either `assignment` or `modules`."""

    assignment: str | None = None
    """An `assignment.json`, or the folder of the run that wrote it."""
    modules: Mapping[Any, Any] = field(default_factory=dict)
    """Module path to logical id. The longest path that covers an operator's module applies; ``""``
    or ``*`` is the rest."""
    devices: Mapping[Any, Any] = field(default_factory=dict)
    """Maps logical ids in the file to logical ids here; others are unchanged."""

    def __post_init__(self) -> None:
        """Check that there is exactly one source, with valid ids and a readable file."""
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
            if type(device) is not int or device < 0:  # bool is a subclass of int
                raise SpecError(
                    f"mode.{name} must name devices by their logical ids 0, 1, 2, got {device!r}"
                )
        decimal = [path for path in self.modules if not isinstance(path, str | int)]
        if decimal:
            raise SpecError(
                f"mode.modules has the number {decimal[0]} for a path: 1.10 would be read as 1.1;"
                " put it in quotes, in a file such as conf/mode/mine.yaml"
            )
        # An invalid file is refused before the model is captured.
        _ = self.saved

    @cached_property
    def saved(self) -> SavedAssignment | None:
        """The content of the file when the options were created; None without a file."""
        return read_assignment(assignment_path(self.assignment)) if self.assignment else None


def aot_based(problem: Problem, options: AotBasedOptions) -> Assignment:
    """Return the placement in `options` for this model.

    Partitions of a file keep their ids if these are a valid execution order, and always their
    replicas; if partitions of one device interleave, they are partitioned anew.

    Raises:
        SpecError: if the placement is for another model, names a device or module that does not
            exist, leaves operators out, or separates operators that must share a device.
        CycleError: if partitions wait for each other.
        InfeasibleError: if a device has too little memory.

    """
    if options.saved is not None:
        placed = _placed_by_file(problem.graph, problem.topology, options.saved, options.devices)
    else:
        # On a command line, the path of a Sequential's child is parsed as a number.
        modules = {str(path): int(device) for path, device in options.modules.items()}
        placed = _placed_by_modules(problem.graph, modules, problem.topology.n_devices)
    refuse_overfull(problem, placed, "aot_based")
    return placed


def refuse_overfull(problem: Problem, placed: Assignment, mode: str) -> None:
    """Raise `InfeasibleError` if a device has too little memory for the placement of `mode`."""
    sizes = problem.topology.memory_bytes
    needed = holding(problem.memory, placed, len(sizes)).peak_bytes
    over = np.flatnonzero(needed > sizes)
    if not len(over):
        return
    worst = int(over[np.argmax(needed[over] - sizes[over])])
    others = f", as have {len(over) - 1} others" if len(over) > 1 else ""
    need, have = int(needed[worst]), int(sizes[worst])
    raise InfeasibleError(
        f"{mode}: device {worst} ({problem.topology.devices[worst].name}) needs"
        f" {show_bytes(need)} ({need} bytes) for its partitions and has {show_bytes(have)} ({have}"
        f" bytes){describe_reserve([problem.topology.devices[worst]])}, too little{others}; move"
        " some of them, take larger devices, or let"
        " mode=size_based or mode=kl_based place the model",
        needed_bytes=need,
        available_bytes=have,
    )
