"""Which partition lies on which device, and which device has room for those that lie on none."""

from collections.abc import Sequence

import numpy as np

from fxpart.torch_compat.accounting.device_map import map_partitions
from fxpart.torch_compat.accounting.problem import StaticProblem
from fxpart.torch_compat.partitioner.checks import check_devices
from fxpart.torch_compat.partitioner.config import ConfigError, Device
from fxpart.torch_compat.partitioner.lowering import lower_partitions
from fxpart.torch_compat.partitioner.partition import Partition

__all__ = [
    "device_positions",
    "get_device_partition_stats",
    "get_device_to_partitions_mapping",
    "get_logical_id_to_device",
]


def get_logical_id_to_device(devices: Sequence[Device]) -> dict[int, Device]:
    """Return the device with each logical id.

    Raises:
        ConfigError: when there are no devices, or two have one id.

    """
    check_devices(devices)
    return {device.logical_id: device for device in devices}


def device_positions(logical_ids: Sequence[int], devices: Sequence[Device], what: str) -> list[int]:
    """Return the place in `devices` of each logical id; `what` names who asks.

    Raises:
        ConfigError: when no device has such an id.

    """
    position = {device.logical_id: index for index, device in enumerate(devices)}
    strange = [asked for asked in logical_ids if asked not in position]
    if strange:
        known = ", ".join(str(known) for known in list(position)[:12])
        raise ConfigError(
            f"{what} is put on logical device {strange[0]}, which is none; there are: {known}"
            + (f", ... ({len(position)} in all)" if len(position) > 12 else "")
        )
    return [position[asked] for asked in logical_ids]


def get_device_partition_stats(
    partitions: Sequence[Partition], devices: Sequence[Device]
) -> tuple[dict[Device, list[Partition]], dict[Device, int], list[Partition]]:
    """Return the partitions on each device, the bytes left there, and partitions on no device.

    Raises:
        ConfigError: when a partition is on a device that is not given, or two have one id.

    """
    check_devices(devices)
    held: dict[Device, list[Partition]] = {device: [] for device in devices}
    left = {device: device.available_mem_bytes for device in devices}
    nowhere = []
    for partition in partitions:
        if not partition.logical_device_ids:
            nowhere.append(partition)
        what = f"partition {partition.partition_id}"
        for index in device_positions(partition.logical_device_ids, devices, what):
            held[devices[index]].append(partition)
            left[devices[index]] -= partition.used_mem_bytes
    return held, left, nowhere


def get_device_to_partitions_mapping(
    partitions: Sequence[Partition], devices: Sequence[Device]
) -> bool:
    """Give each partition without a device one, and return whether that was possible.

    As in torch: the device with the least memory left that holds it; what several partitions of a
    device read counts once. Where that leads nowhere, exact fits and other orders are tried. When
    the answer is False, no partition has been changed.

    Raises:
        CaptureError: when a node has no size.

    """
    nowhere = get_device_partition_stats(partitions, devices)[2]
    if not nowhere:
        return True
    memory = [device.available_mem_bytes for device in devices]
    fixed = []
    for partition in partitions:
        ids = partition.logical_device_ids
        homes = device_positions(ids, devices, f"partition {partition.partition_id}")
        fixed.append(homes[0] if homes else -1)
        for replica in homes[1:]:
            memory[replica] -= partition.used_mem_bytes
    graph, partition_of = lower_partitions(partitions)
    problem = StaticProblem(graph, np.array(memory, dtype=np.int64), 0.0)
    homes_found = map_partitions(problem, partition_of, len(partitions), fixed)
    if homes_found is None:
        return False
    for partition, home in zip(partitions, homes_found, strict=True):
        if not partition.logical_device_ids:
            partition.logical_device_ids = [devices[int(home)].logical_id]
    return True
