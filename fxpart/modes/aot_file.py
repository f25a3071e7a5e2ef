"""The placement of an `assignment.json` for a model and devices that may be others."""

from collections.abc import Mapping

from fxpart.assignment import Assignment
from fxpart.errors import SpecError
from fxpart.graph import OpGraph
from fxpart.saved_assignment import SavedAssignment, assignment_for
from fxpart.topology import Topology
from fxpart.valid_assignment import in_valid_order, refuse_torn_groups

__all__ = ["placed_by_file"]


def placed_by_file(
    graph: OpGraph, topology: Topology, saved: SavedAssignment, devices: Mapping[int, int]
) -> Assignment:
    """Return the saved placement with the ids of its devices changed as `devices` says.

    Partitions keep their ids where they can be carried out by number, and always their replicas.

    Raises:
        SpecError: when it is of another model, a device is not there, or operators that must share
            one would not.
        CycleError: when partitions wait for each other.

    """
    placed = _on_devices(assignment_for(saved, graph), devices, topology)
    refuse_torn_groups(graph, placed)
    return in_valid_order(graph, placed)


def _on_devices(saved: Assignment, changed: Mapping[int, int], topology: Topology) -> Assignment:
    """Return the saved placement with the ids of its devices changed as asked."""
    known = {device for homes in saved.devices_of_partition for device in homes}
    strange = sorted(device for device in changed if device not in known)
    if strange:
        used = ", ".join(map(str, sorted(known)))
        raise SpecError(
            f"mode.devices names device {strange[0]}, the saved assignment uses {used}; name those"
        )
    homes = []
    for partition, devices in enumerate(saved.devices_of_partition):
        mapped = [int(changed.get(device, device)) for device in devices]
        for before, after in zip(devices, mapped, strict=True):
            if after >= topology.n_devices:
                raise SpecError(
                    f"partition {partition} is on device {after}, there are {topology.n_devices},"
                    f" numbered from 0; take more devices, or map it: mode.devices={{{before}: 0}}"
                )
        # Two replicas on one device are one.
        homes.append(tuple(dict.fromkeys(mapped)))
    return Assignment(saved.partition_of, tuple(homes))
