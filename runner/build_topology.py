"""From two sections of the configuration to devices and links."""

from fxpart.errors import SpecError
from fxpart.topology import DeviceSpec, Link, Topology, uniform_topology
from runner.sections import DevicesConfig, LinkConfig, PoolConfig

__all__ = ["build_topology"]


def build_topology(devices: DevicesConfig, transfer_rate: LinkConfig) -> Topology:
    """Return the devices, pool by pool, with `transfer_rate` between those of one machine.

    Raises:
        SpecError: for a number that makes no sense, or machines that do not match the pools.

    """
    nodes = devices.nodes if devices.nodes is not None else [0] * len(devices.pools)
    if len(nodes) != len(devices.pools):
        raise SpecError(
            f"devices.nodes names the machines of {len(nodes)} pools, there are"
            f" {len(devices.pools)}; give one for each"
        )
    built = tuple(
        DeviceSpec(
            name=pool.name,
            memory_bytes=pool.memory_bytes,
            flops_per_s=dict(pool.flops_per_s),
            memory_bandwidth_bytes_per_s=pool.memory_bandwidth_bytes_per_s,
            node=node,
        )
        for pool, node in zip(devices.pools, nodes, strict=True)
        for _ in range(_count(pool))
    )
    far = devices.between_nodes
    return uniform_topology(built, _link(transfer_rate), _link(far) if far else None)


def _count(pool: PoolConfig) -> int:
    if pool.count < 1:
        raise SpecError(f"devices.pools: count of {pool.name} must be at least 1, got {pool.count}")
    return pool.count


def _link(link: LinkConfig) -> Link:
    return Link(bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
