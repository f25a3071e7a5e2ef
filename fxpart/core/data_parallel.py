"""Data parallelism: equal replicas of one placement, each with its share of the batch.

Every replica holds all weights; the devices that hold the same ones in each replica form a ring,
which adds up gradients.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.core.topology import DeviceSpec, Link, Topology
from fxpart.errors import NotApplicableError, SpecError, nearest_degrees

__all__ = ["DataParallel", "check_replica_count", "ring_links", "share_of_batch", "split_topology"]


@dataclass(frozen=True, eq=False, slots=True)
class DataParallel:
    """Devices dealt out to replicas."""

    replica: Topology
    """The devices of one replica and the links between them; all replicas are alike."""
    rings: IntArray
    """Which device of the whole each device of the replica is, shape (replicas, D)."""
    links: tuple[Link, ...]
    """For each device of the replica the slowest link of its ring. Length D."""

    @property
    def n_replicas(self) -> int:
        """Number of replicas."""
        return len(self.rings)


def check_replica_count(replicas: int) -> None:
    """Raise `SpecError` for a number of replicas that cannot be."""
    if replicas < 1:
        raise SpecError(f"data_parallel={replicas} must be 1 or more")


def share_of_batch(batch_size: int, replicas: int) -> int:
    """Return the examples that each replica gets of a batch.

    Raises:
        SpecError: when they do not divide it, or there are none.

    """
    check_replica_count(replicas)
    if batch_size % replicas:
        more = batch_size + replicas - batch_size % replicas
        raise NotApplicableError(
            f"data_parallel={replicas} splits the batch evenly, got model.batch_size={batch_size};"
            f" make it a multiple of {replicas}, such as {more}"
        )
    return batch_size // replicas


def split_topology(topology: Topology, replicas: int, asked: str | None = None) -> DataParallel:
    """Return the devices of `topology` dealt out to `replicas` that are alike.

    Neighbours stay in one replica where that makes equal ones: then transfers of a placement are
    between neighbours, and only sums of gradients go farther. Else each run of equal devices is
    dealt out evenly, so that ``2x80gb+4x16gb`` makes two of ``1x80gb+2x16gb``. `asked` is what a
    message says of the number, by default ``data_parallel=``.

    Raises:
        SpecError: for devices that do not make that many equal replicas.

    """
    n = topology.n_devices
    check_replica_count(replicas)
    if n % replicas == 0:
        for rings in (_blocks(n, replicas), _dealt(topology, replicas)):
            if rings is not None and _alike(topology, rings):
                return DataParallel(_part(topology, rings[0]), rings, ring_links(topology, rings))
    near = nearest_degrees(replicas, _kind_counts(topology))
    raise NotApplicableError(
        f"{asked or f'data_parallel={replicas}'} needs as many equal parts of the devices, there"
        f" are {n}: {_shown(topology)}; make it {near},"
        f" or give each kind a number that {replicas} divides, and each part the"
        " same links"
    )


def _blocks(n: int, replicas: int) -> IntArray:
    return np.arange(n, dtype=np.int64).reshape(replicas, n // replicas)


def _kind(device: DeviceSpec) -> tuple[object, ...]:
    """Return the numbers of a device, whatever it is called and wherever it sits."""
    rates = tuple(sorted(device.flops_per_s.items()))
    return device.memory_bytes, device.memory_bandwidth_bytes_per_s, rates


def _kind_counts(topology: Topology) -> list[int]:
    """Return how many neighbours are alike in each run of the devices."""
    return [len(list(run)) for _, run in groupby(map(_kind, topology.devices))]


def _dealt(topology: Topology, replicas: int) -> IntArray | None:
    """Return the devices with every run of equal ones dealt out; None if a run cannot be."""
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
    """Return whether all replicas have the same devices and links, whichever machine they are."""
    parts = [_part(topology, row) for row in rings]
    first = parts[0]
    return all(
        [_kind(device) for device in part.devices] == [_kind(device) for device in first.devices]
        and np.array_equal(part.bytes_per_s, first.bytes_per_s)
        and np.array_equal(part.latency_s, first.latency_s)
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


def ring_links(topology: Topology, rings: IntArray) -> tuple[Link, ...]:
    """Return the slowest link of the ring in each column of `rings`, shape (devices, rings).

    Of a ring of one device it is one that nothing goes over.
    """
    if len(rings) == 1:
        return tuple(Link(1.0) for _ in range(rings.shape[1]))
    following = np.roll(rings, -1, axis=0)
    rates = topology.bytes_per_s[rings, following].min(axis=0)
    latencies = topology.latency_s[rings, following].max(axis=0)
    return tuple(Link(float(r), float(s)) for r, s in zip(rates, latencies, strict=True))


def _shown(topology: Topology) -> str:
    names = [device.name for device in topology.devices]
    return "+".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))
