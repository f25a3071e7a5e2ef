"""Data parallelism: equal replicas of one placement, each with its share of the batch.

Every replica holds all weights. The devices that hold the same weights in each replica form a ring,
over which gradients are all-reduced.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.core.topology import DeviceSpec, Link, Topology
from fxpart.errors import NotApplicableError, SpecError, nearest_degrees

__all__ = [
    "DataParallel",
    "check_replica_count",
    "ring_links",
    "share_of_batch",
    "share_of_sequence",
    "split_topology",
]


@dataclass(frozen=True, eq=False, slots=True)
class DataParallel:
    """Devices divided among replicas."""

    replica: Topology
    """The devices of one replica and the links between them; all replicas are identical."""
    rings: IntArray
    """Global id of each device of each replica, shape (replicas, D); a column is a ring."""
    links: tuple[Link, ...]
    """The slowest link in the ring of each device of the replica. Length D."""

    @property
    def n_replicas(self) -> int:
        """Number of replicas."""
        return len(self.rings)


def check_replica_count(replicas: int) -> None:
    """Raise `SpecError` if the number of replicas is below 1."""
    if replicas < 1:
        raise SpecError(f"data_parallel={replicas} must be 1 or more")


def share_of_batch(batch_size: int, replicas: int) -> int:
    """Return the number of examples per replica.

    Raises:
        SpecError: if there are no replicas.
        NotApplicableError: if they do not divide the batch.

    """
    check_replica_count(replicas)
    if batch_size % replicas:
        suggestion = batch_size + replicas - batch_size % replicas
        raise NotApplicableError(
            f"data_parallel={replicas} splits the batch evenly, got model.batch_size={batch_size};"
            f" make it a multiple of {replicas}, such as {suggestion}"
        )
    return batch_size // replicas


def share_of_sequence(seq_len: int | None, group: int) -> int | None:
    """Return the number of positions per device of a context-parallel group.

    Raises:
        NotApplicableError: if the length is None or does not divide into equal pieces; one device
            takes any.

    """
    if group == 1:
        return seq_len
    chunks = 2 * group
    if seq_len is None or seq_len % chunks:
        use = f"set model.seq_len to a multiple of {chunks}"
        if seq_len is not None:
            below = seq_len - seq_len % chunks
            use = f"use model.seq_len={f'{below} or ' if below else ''}{below + chunks}"
        raise NotApplicableError(
            f"context_parallel={group} cuts each sequence into {chunks} chunks, two a device,"
            f" got model.seq_len={'null' if seq_len is None else seq_len}; {use}"
        )
    return seq_len // group


def split_topology(topology: Topology, replicas: int, asked: str | None = None) -> DataParallel:
    """Divide the devices of `topology` among identical `replicas`.

    Consecutive devices form a replica if that makes replicas identical: then the transfers of a
    placement stay between neighbours and only gradients go farther. Otherwise each run of equal
    devices is divided evenly, so that ``2x80gb+4x16gb`` makes two of ``1x80gb+2x16gb``. `asked`
    names the option in messages, by default ``data_parallel=``.

    Raises:
        SpecError: if there are no replicas.
        NotApplicableError: if the devices do not make that many equal replicas.

    """
    n = topology.n_devices
    check_replica_count(replicas)
    if n % replicas == 0:
        for rings in (_blocks(n, replicas), _dealt(topology, replicas)):
            if rings is not None and _alike(topology, rings):
                return DataParallel(_part(topology, rings[0]), rings, ring_links(topology, rings))
    suggestion = nearest_degrees(replicas, _kind_counts(topology))
    raise NotApplicableError(
        f"{asked or f'data_parallel={replicas}'} needs that many equal parts of the devices, but "
        f"there are {n}: {_shown(topology)}; make it {suggestion}, or give each kind a number that "
        f"{replicas} divides, and each part the same links"
    )


def _blocks(n: int, replicas: int) -> IntArray:
    return np.arange(n, dtype=np.int64).reshape(replicas, n // replicas)


def _kind(device: DeviceSpec) -> tuple[object, ...]:
    """Return the memory and rates of a device, which its name and node do not affect."""
    rates = tuple(sorted(device.flops_per_s.items()))
    sustained = tuple(sorted(device.sustained_flops_per_s.items()))
    bandwidth = device.memory_bandwidth_bytes_per_s
    return device.memory_bytes, bandwidth, rates, sustained, device.efficiency


def _kind_counts(topology: Topology) -> list[int]:
    """Return the length of each run of equal devices."""
    return [len(list(run)) for _, run in groupby(map(_kind, topology.devices))]


def _dealt(topology: Topology, replicas: int) -> IntArray | None:
    """Return rings that divide every run of equal devices evenly; None if one is not divisible."""
    columns: list[IntArray] = []
    kinds = [_kind(device) for device in topology.devices]
    begin = 0
    for end in range(1, len(kinds) + 1):
        if end < len(kinds) and kinds[end] == kinds[begin]:
            continue
        if (end - begin) % replicas:
            return None
        columns.append(_blocks(end - begin, replicas) + begin)
        begin = end
    return np.concatenate(columns, axis=1)


def _alike(topology: Topology, rings: IntArray) -> bool:
    """Return whether all replicas have the same devices and links, regardless of their nodes."""
    parts = [_part(topology, row) for row in rings]
    first_replica = parts[0]
    return all(
        [_kind(device) for device in part.devices]
        == [_kind(device) for device in first_replica.devices]
        and np.array_equal(part.bytes_per_s, first_replica.bytes_per_s)
        and np.array_equal(part.latency_s, first_replica.latency_s)
        for part in parts[1:]
    )


def _part(topology: Topology, devices: IntArray) -> Topology:
    square = np.ix_(devices, devices)
    return Topology(
        tuple(topology.devices[device] for device in devices.tolist()),
        topology.bytes_per_s[square],
        topology.latency_s[square],
        topology.host_launch_s,
    )


def ring_links(topology: Topology, rings: IntArray, *, exchanges: bool = False) -> tuple[Link, ...]:
    """Return the slowest link of each column of `rings`, shape (devices, rings).

    A ring visits machine by machine. A library makes as many rings of it as a machine's members
    have adapters, so their rates add up between machines. Adapters are shared with the other
    devices of the machine. A ring of a single device gets a placeholder link that carries nothing.

    Args:
        topology: all devices.
        rings: their indices.
        exchanges: whether each device sends its own values to all others, as in an all-to-all, and
            so has its own adapter only.

    """
    if len(rings) == 1:
        return tuple(Link(1.0) for _ in range(rings.shape[1]))
    node_of = np.array([device.node for device in topology.devices])
    adapters_of = np.array([device.adapters for device in topology.devices])
    by_node = np.argsort(node_of[rings], axis=0, kind="stable")
    members = np.take_along_axis(rings, by_node, axis=0)
    following, nodes = np.roll(members, -1, axis=0), node_of[members]
    adapters = adapters_of[members]
    if not exchanges:
        # Those of all members on the same machine, shape (devices, rings).
        adapters = ((nodes[:, None] == nodes) * adapters).sum(axis=1)
    crosses = nodes != np.roll(nodes, -1, axis=0)
    used = np.where(crosses, np.minimum(adapters, np.roll(adapters, -1, axis=0)), 1.0)
    rates = (topology.bytes_per_s[members, following] * used).min(axis=0)
    latencies = topology.latency_s[members, following].max(axis=0)
    return tuple(Link(float(r), float(s)) for r, s in zip(rates, latencies, strict=True))


def _shown(topology: Topology) -> str:
    names = [device.name for device in topology.devices]
    return "+".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))
