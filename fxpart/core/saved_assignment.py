"""`assignment.json`: a placement saved by one run and read by others.

The file names its schema and version and contains nothing that varies between runs, so equal
placements are byte-identical.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.errors import SpecError, nearest_names
from fxpart.support.json_file import read_document, what_is_wrong
from fxpart.support.text_files import write_json

__all__ = [
    "ASSIGNMENT_FILE",
    "SavedAssignment",
    "SavedPartition",
    "assignment_document",
    "assignment_for",
    "assignment_path",
    "read_assignment",
    "write_assignment",
]

ASSIGNMENT_FILE = "assignment.json"
"""Name of the file in a run's folder."""
_SCHEMA = "fxpart.assignment"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """One partition of a saved assignment."""

    devices: tuple[int, ...]
    """Logical ids in round-robin order; never empty."""
    operators: tuple[str, ...]
    """Operator names in graph order."""


@dataclass(frozen=True, slots=True)
class SavedAssignment:
    """The content of an `assignment.json`."""

    model: Mapping[str, object]
    devices: tuple[Mapping[str, object], ...]
    """``logical_id``, ``name``, ``memory_bytes`` (total, including the reserve) and ``node`` of
    each device, and ``is_tier`` if it is a memory tier that computes modules."""
    partitions: tuple[SavedPartition, ...]
    """Indexed by partition id."""
    modules: Mapping[str, int | list[int]]
    """Maps a module path to the device that runs or holds all of it, or to a list of several."""


def assignment_path(place: str) -> Path:
    """Return the file at `place`, which is either the file itself or a run's folder."""
    path = Path(place)
    with suppress(OSError):  # the name is too long; reading the file reports it
        if path.is_dir():
            return path / ASSIGNMENT_FILE
    return path


def write_assignment(
    path: str | Path,
    graph: OpGraph,
    topology: Topology,
    assignment: Assignment,
    model: Mapping[str, object] | None = None,
) -> None:
    """Write a placement to `path`, atomically. `model` is any JSON description of the model.

    `read_assignment` and `assignment_for` read it back, and so does the mode ``aot_based``.

    Raises:
        SpecError: if the assignment is for another graph or uses devices that do not exist.
        CacheError: if it cannot be written.

    """
    assignment.check_for(graph.n_ops, topology.n_devices)
    write_json(Path(path), assignment_document(graph, topology, assignment, model or {}))


def assignment_document(
    graph: OpGraph, topology: Topology, assignment: Assignment, model: Mapping[str, object]
) -> dict[str, object]:
    """Return the document to write. `model` is any JSON-serializable description of the model."""
    operators: list[list[str]] = [[] for _ in range(assignment.n_partitions)]
    for name, partition in zip(graph.names, assignment.partition_of.tolist(), strict=True):
        operators[partition].append(name)
    return {
        "schema": _SCHEMA,
        "version": _VERSION,
        "model": model,
        "devices": [
            {"logical_id": i, "name": d.name, "memory_bytes": d.total_bytes, "node": d.node}
            | ({"is_tier": True} if d.is_tier else {})
            for i, d in enumerate(topology.devices)
        ],
        "partitions": [
            {"id": p, "devices": assignment.devices_of_partition[p], "operators": names}
            for p, names in enumerate(operators)
        ],
        "modules": _module_devices(graph, assignment),
    }


def _module_devices(graph: OpGraph, assignment: Assignment) -> dict[str, int | list[int]]:
    """Return the devices of each module including its submodules; "" is the whole model.

    Checks of another operator's result are ignored: they say nothing about the enclosing module.
    """
    devices_of: dict[str, set[int]] = {"": set()}
    operators = np.flatnonzero(~graph.is_check)
    modules = [graph.modules[op] for op in operators.tolist()]
    # Deduplicated, as most operators of a module are in one partition.
    pairs = dict.fromkeys(zip(modules, assignment.partition_of[operators].tolist(), strict=True))
    for module, partition in pairs:
        homes = assignment.devices_of_partition[partition]
        devices_of[""].update(homes)
        for path in _paths(module):
            devices_of.setdefault(path, set()).update(homes)
    return {path: ids.pop() if len(ids) == 1 else sorted(ids) for path, ids in devices_of.items()}


@lru_cache(maxsize=1 << 14)
def _paths(module: str) -> tuple[str, ...]:
    """Return the module and its ancestors, outermost first, without the model itself."""
    return tuple(accumulate(module.split("."), "{}.{}".format)) if module else ()


def read_assignment(path: str | Path) -> SavedAssignment:
    """Read and check an `assignment.json`.

    Raises:
        SpecError: if the file is missing, damaged, of another kind, or newer than this code.

    """
    path = Path(path)
    document = read_document(path, _SCHEMA, _VERSION)
    try:
        devices = tuple(_checked_device(entry) for entry in document["devices"])
        partitions = tuple(
            _checked_partition(entry, expected, len(devices))
            for expected, entry in enumerate(document["partitions"])
        )
        model, modules = (
            dict(document["model"]),
            _checked_modules(document["modules"], len(devices)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)}); write it again") from error
    _refuse_repeats(path, partitions)
    return SavedAssignment(model, devices, partitions, modules)


def _checked_device(entry: Mapping[str, Any]) -> Mapping[str, object]:
    size = entry["memory_bytes"]
    if not isinstance(entry["name"], str) or type(size) is not int or size < 1:
        raise ValueError("a device without a name or size")
    return dict(entry)


def _checked_partition(entry: Mapping[str, Any], expected: int, devices: int) -> SavedPartition:
    if entry["id"] != expected:
        raise ValueError(f"partition {entry['id']} where {expected} should be")
    homes, names = tuple(entry["devices"]), tuple(entry["operators"])
    if not homes or not all(_is_id(d, devices) for d in homes):
        raise ValueError(f"partition {expected} is on {list(homes)}, there are {devices} devices")
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"partition {expected} has no operators")
    return SavedPartition(homes, names)


def _checked_modules(entry: Mapping[str, Any], devices: int) -> Mapping[str, int | list[int]]:
    modules = dict(entry)
    for path, home in modules.items():
        ids = home if isinstance(home, list) else [home]
        if not ids or not all(_is_id(d, devices) for d in ids):
            raise ValueError(f"module {path!r} is on {home}, there are {devices} devices")
    return modules


def _is_id(device: object, devices: int) -> bool:
    # bool is a subclass of int.
    return type(device) is int and 0 <= device < devices


def _refuse_repeats(path: Path, partitions: Sequence[SavedPartition]) -> None:
    owner: dict[str, int] = {}
    for index, partition in enumerate(partitions):
        for name in partition.operators:
            if name in owner:
                raise SpecError(
                    f"{path} has operator {name} twice, in partitions {owner[name]} and {index};"
                    " keep one"
                )
            owner[name] = index


def assignment_for(saved: SavedAssignment, graph: OpGraph) -> Assignment:
    """Return the saved placement for `graph`.

    Raises:
        SpecError: if the two do not have the same operators.

    """
    partition_of = {
        name: index
        for index, partition in enumerate(saved.partitions)
        for name in partition.operators
    }
    known = set(graph.names)
    foreign = [name for name in partition_of if name not in known]
    if foreign:
        near = nearest_names(foreign[0], graph.names)
        raise SpecError(
            f"the saved assignment places {foreign[0]}, which the model does not have; {near}; is "
            "it from another model, or from a capture with another phase or capture.symbolic, "
            "which numbers operators differently? Use one of the same kind"
        )
    missing = [name for name in graph.names if name not in partition_of]
    if missing:
        raise SpecError(
            f"the saved assignment leaves out {len(missing)} of {graph.n_ops} operators, the first"
            f" is {missing[0]}; save one of this model, captured as here (phase, capture.symbolic)"
        )
    return Assignment(
        np.array([partition_of[name] for name in graph.names], dtype=np.int64),
        tuple(partition.devices for partition in saved.partitions),
    )
