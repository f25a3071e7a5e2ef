"""Tensor parallelism: groups of devices that share the work of every operator.

All devices of a group have equal memory and work, so a plan places operators on groups: each is
represented by one of its devices, and its collectives are operators of the graph.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.data_parallel import ring_links
from fxpart.core.graph import IntArray
from fxpart.core.topology import Link, Topology
from fxpart.errors import NotApplicableError, SpecError, nearest_degrees

__all__ = ["TensorGroups", "refused_count", "tensor_groups"]


@dataclass(frozen=True, eq=False, slots=True)
class TensorGroups:
    """Devices divided into tensor-parallel groups."""

    topology: Topology
    """One device per group, with the power of the whole group, and the links between groups. G
    devices."""
    members: IntArray
    """The devices of each group, shape (G, N)."""
    links: tuple[Link, ...]
    """The slowest link in the ring of each group. Length G."""

    @property
    def size(self) -> int:
        """Number of devices in a group."""
        return int(self.members.shape[1])


def refused_count(degree: int, counts: Mapping[str, int], copied: Mapping[str, int]) -> str | None:
    """Return what `degree` does not suit: the first of `counts` that it does not divide.

    Of the `copied`, such as heads of keys that several devices hold, it may be a multiple too.

    Returns:
        the requirement in words, with the key of that count; None if it suits all.

    """
    for what, count in counts.items():
        if count % degree:
            return f"divide {what}"
    for what, count in copied.items():
        if count % degree and degree % count:
            return f"divide {what}, or be a multiple of that"
    return None


def tensor_groups(topology: Topology, size: int) -> TensorGroups:
    """Divide the devices of `topology` into groups of `size` neighbours, which must be equal.

    Raises:
        SpecError: if the size is below 1.
        NotApplicableError: if the size does not divide the number of devices, devices of a group
            differ, or a group has some devices of a machine and others of another.

    """
    if size < 1:
        raise SpecError(f"tensor_parallel={size} must be 1 or more")
    n = topology.n_devices
    if n % size:
        raise NotApplicableError(
            f"tensor_parallel={size} must divide the number of devices, there are {n}; use"
            f" {nearest_degrees(size, [n])}"
        )
    members = np.arange(n, dtype=np.int64).reshape(n // size, size)
    for group in members.tolist():
        _refuse_unlike(topology, group)
        _refuse_apart(topology, group)
    links = ring_links(topology, members.T)
    if size == 1:
        return TensorGroups(topology, members, links)
    # Devices of two groups communicate pairwise, each with its counterpart.
    pairs = [np.ix_(row, row) for row in members.T]
    rate = np.min([topology.bytes_per_s[pair] for pair in pairs], axis=0)
    latency = np.max([topology.latency_s[pair] for pair in pairs], axis=0)
    firsts = [topology.devices[device] for device in members[:, 0].tolist()]
    devices = tuple(replace(first, power_w=size * first.power_w) for first in firsts)
    within = Topology(devices, rate, latency, topology.host_launch_s)
    return TensorGroups(within, members, links)


def _refuse_apart(topology: Topology, group: list[int]) -> None:
    """Refuse a group on several machines unless it has all devices of each."""
    in_machine = Counter(device.node for device in topology.devices)
    in_group = Counter(topology.devices[device].node for device in group)
    if len(in_group) > 1 and any(in_machine[node] > count for node, count in in_group.items()):
        raise NotApplicableError(
            f"tensor_parallel={len(group)} would split layers over devices {group[0]} to"
            f" {group[-1]}, which are parts of {len(in_group)} machines; use"
            f" {nearest_degrees(len(group), in_machine.values())}"
        )


def _refuse_unlike(topology: Topology, group: list[int]) -> None:
    devices = [topology.devices[device] for device in group]
    first = devices[0]
    for device in devices[1:]:
        same = (
            device.memory_bytes == first.memory_bytes
            and dict(device.flops_per_s) == dict(first.flops_per_s)
            and dict(device.sustained_flops_per_s) == dict(first.sustained_flops_per_s)
            and device.efficiency == first.efficiency
            and device.memory_bandwidth_bytes_per_s == first.memory_bandwidth_bytes_per_s
            and device.power_w == first.power_w
        )
        if not same:
            raise NotApplicableError(
                f"tensor_parallel={len(group)} splits every operator evenly over {len(group)} "
                f"neighbours, but devices {group[0]} to {group[-1]} are {first.name} and "
                f"{device.name}; use equal devices, or a smaller tensor_parallel"
            )
