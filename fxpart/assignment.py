"""`Assignment`: which operator goes to which partition, and which partition to which devices."""

from dataclasses import dataclass

import numpy as np

from fxpart.errors import SpecError
from fxpart.graph import IntArray

__all__ = ["Assignment"]


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """A decided placement. Partitions are numbered so that none reads from a later one."""

    partition_of: IntArray
    """Partition of each operator. Length n."""
    devices_of_partition: tuple[tuple[int, ...], ...]
    """Logical ids of the devices that hold each partition; never empty. The first computes it,
    the others hold replicas."""

    def __post_init__(self) -> None:
        """Refuse partitions without a device or without an operator."""
        count = len(self.devices_of_partition)
        empty = [p for p, devices in enumerate(self.devices_of_partition) if not devices]
        if empty:
            raise SpecError(f"partition {empty[0]} has no device")
        present = np.unique(self.partition_of)
        if not np.array_equal(present, np.arange(count)):
            raise SpecError(
                f"partitions must be numbered 0..{count - 1} with an operator in each,"
                f" got {len(present)} in use"
            )

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.devices_of_partition)

    @property
    def device_of(self) -> IntArray:
        """Logical id of the device that computes each operator. Length n."""
        first = np.array([devices[0] for devices in self.devices_of_partition], dtype=np.int64)
        return first[self.partition_of]
