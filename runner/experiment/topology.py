"""Devices and links from the configuration."""

from collections import Counter
from dataclasses import replace
from typing import Any

from fxpart.core.device_spec import MAX_DEVICES
from fxpart.core.efficiency import Efficiency, efficiency_from
from fxpart.core.reserve import Reserve, with_reserve
from fxpart.core.topology import (
    DeviceSpec,
    Link,
    Topology,
    uniform_topology,
    with_pair_links,
)
from fxpart.errors import SpecError
from runner.config.device_schema import DevicesConfig, LinkConfig, PairConfig, PoolConfig
from runner.config.schema import Config, ReserveConfig

__all__ = ["build_topology", "cpu_devices", "reserve_of", "rounding_bytes"]


def build_topology(
    devices: DevicesConfig, transfer_rate: LinkConfig, reserve: ReserveConfig | None = None
) -> Topology:
    """Return the devices, pool by pool, connected by `transfer_rate` within a machine.

    `reserve` is subtracted from the memory of each device that is not the host itself.

    Raises:
        SpecError: if a number is out of range, there are too many devices, `devices.nodes` does not
            match the pools.
        InfeasibleError: if a device is smaller than its reserve.

    """
    nodes = devices.nodes if devices.nodes is not None else [0] * len(devices.pools)
    if len(nodes) != len(devices.pools):
        raise SpecError(
            f"devices.nodes names the machines of {len(nodes)} pools, there are"
            f" {len(devices.pools)}; give one for each"
        )
    total = sum(map(_count, devices.pools))
    if total > MAX_DEVICES:  # memory grows with the pairs of devices
        raise SpecError(f"devices.pools: {total} devices are too many, at most {MAX_DEVICES}")
    reserved = reserve_of(reserve or ReserveConfig())
    share_of = _adapter_shares(devices, nodes)
    built = tuple(
        replace(_device(pool, node, reserved), adapters=share_of[node])
        for pool, node in zip(devices.pools, nodes, strict=True)
        for _ in range(pool.count)
    )
    topology = uniform_topology(
        built, _link(transfer_rate), _between_nodes(devices.between_nodes, transfer_rate)
    )
    return with_pair_links(topology, dict(_pair(pair) for pair in devices.pairs))


def _between_nodes(adapter: LinkConfig | None, transfer_rate: LinkConfig) -> Link | None:
    """Return the link between machines, if any: that of a network adapter.

    Where PCIe joins the devices of a machine, it joins their adapters too, and limits their rate.
    """
    if adapter is None:
        return None
    rate = min(adapter.bytes_per_s, transfer_rate.bytes_per_s)
    return replace(_link(adapter), bytes_per_s=rate)


def _adapter_shares(devices: DevicesConfig, nodes: list[int]) -> dict[int, float]:
    """Return the share of a network adapter that each device of a machine has, by machine."""
    sizes = Counter[int]()
    for pool, node in zip(devices.pools, nodes, strict=True):
        sizes[node] += pool.count
    adapters = devices.adapters_per_node
    if adapters is not None and not 1 <= adapters <= min(sizes.values(), default=1):
        raise SpecError(
            f"devices.adapters_per_node must be from 1 to the devices of a machine"
            f" ({min(sizes.values(), default=1)}), got {adapters}; leave it out for one each"
        )
    return {node: min(1.0, (adapters or size) / size) for node, size in sizes.items()}


def cpu_devices(config: Config, topology: Topology) -> list[int]:
    """Return the devices that are CPUs; those of a published problem are no real devices."""
    if config.model.path is not None:
        return []
    return [index for index, device in enumerate(topology.devices) if device.on_host]


def reserve_of(config: ReserveConfig) -> Reserve:
    """Return the memory of a device that is not available to tensors.

    Raises:
        SpecError: if a number is out of range.

    """
    values: dict[str, Any] = {name: getattr(config, name) for name in Reserve.__slots__}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return Reserve(**values)


def rounding_bytes(devices: DevicesConfig, reserve: ReserveConfig) -> int:
    """Return the multiple that sizes are rounded up to; 1 if every device is the host itself."""
    return 1 if all(pool.on_host for pool in devices.pools) else reserve.rounding_bytes


def _device(pool: PoolConfig, node: int, reserve: Reserve) -> DeviceSpec:
    whole = DeviceSpec(
        name=pool.name,
        memory_bytes=pool.memory_bytes,
        flops_per_s=dict(pool.flops_per_s),
        sustained_flops_per_s=dict(pool.sustained_flops_per_s),
        efficiency=_efficiency(pool),
        memory_bandwidth_bytes_per_s=pool.memory_bandwidth_bytes_per_s,
        node=node,
        multiprocessors=pool.multiprocessors,
        curves=pool.curves,
        own_curves=pool.own_curves,
        power_w=pool.power_w,
        on_host=pool.on_host,
    )
    return whole if pool.on_host else with_reserve(whole, reserve)


def _efficiency(pool: PoolConfig) -> Efficiency:
    try:
        return efficiency_from(pool.efficiency)
    except SpecError as error:
        raise SpecError(f"devices.pools: {pool.name}: {error}") from error


def _count(pool: PoolConfig) -> int:
    if pool.count < 1:
        raise SpecError(f"devices.pools: count of {pool.name} must be at least 1, got {pool.count}")
    return pool.count


def _pair(pair: PairConfig) -> tuple[tuple[int, int], Link]:
    if len(pair.devices) != 2:
        raise SpecError(
            f"devices.pairs: a link joins two devices, got {pair.devices}; write devices: [0, 1]"
        )
    return (pair.devices[0], pair.devices[1]), _link(pair)


def _link(link: LinkConfig) -> Link:
    return Link(bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
