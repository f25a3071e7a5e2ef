"""Map partitions to devices, and find devices for unplaced partitions."""

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
        ConfigError: if there are no devices, or two share an id.

    """
    check_devices(devices)
    return {device.logical_id: device for device in devices}


def device_positions(logical_ids: Sequence[int], devices: Sequence[Device], what: str) -> list[int]:
    """Return the index in `devices` of each logical id; errors refer to their owner as `what`.

    Raises:
        ConfigError: if no device has such an id.

    """
    position = {device.logical_id: index for index, device in enumerate(devices)}
    unknown = [logical_id for logical_id in logical_ids if logical_id not in position]
    if unknown:
        known_ids = ", ".join(map(str, list(position)[:12]))
        raise ConfigError(
            f"{what} is put on logical device {unknown[0]}, which does not exist; there are: "
            f"{known_ids}" + (f", ... ({len(position)} in all)" if len(position) > 12 else "")
        )
    return [position[logical_id] for logical_id in logical_ids]


def get_device_partition_stats(
    partitions: Sequence[Partition], devices: Sequence[Device]
) -> tuple[dict[Device, list[Partition]], dict[Device, int], list[Partition]]:
    """Return the partitions on each device, its free bytes, and the partitions without a device.

    Raises:
        ConfigError: if a partition is on an unknown device, or two devices share an id.

    """
    check_devices(devices)
    placed: dict[Device, list[Partition]] = {device: [] for device in devices}
    free_bytes = {device: device.available_mem_bytes for device in devices}
    unplaced = []
    for partition in partitions:
        if not partition.logical_device_ids:
            unplaced.append(partition)
        owner = f"partition {partition.partition_id}"
        for index in device_positions(partition.logical_device_ids, devices, owner):
            placed[devices[index]].append(partition)
            free_bytes[devices[index]] -= partition.used_mem_bytes
    return placed, free_bytes, unplaced


def get_device_to_partitions_mapping(
    partitions: Sequence[Partition], devices: Sequence[Device]
) -> bool:
    """Assign a device to each partition without one, and return whether that was possible.

    As in torch: the device with the least free memory that has room; values read by several
    partitions of a device count once. If that fails, exact fits and other orders are tried. If the
    answer is False, no partition has been changed.

    Raises:
        CaptureError: if a node has no size.

    """
    unplaced = get_device_partition_stats(partitions, devices)[2]
    if not unplaced:
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
    mapped = map_partitions(problem, partition_of, len(partitions), fixed)
    if mapped is None:
        return False
    for partition, home in zip(partitions, mapped, strict=True):
        if not partition.logical_device_ids:
            partition.logical_device_ids = [devices[int(home)].logical_id]
    return True
