"""`Assignment`: the partition of each operator, and the devices of each partition."""

import math
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.errors import SpecError

__all__ = ["MOST_ROUNDS", "Assignment"]

MOST_ROUNDS = 1024
"""Longest allowed period, in inputs, of the joint round-robin of all replicas."""


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """A placement. Partitions are numbered so that none reads from a later one.

    A partition on several devices has *replicas*, which take inputs round-robin: input i runs on
    its device i modulo their count. The pattern repeats after `rounds` inputs.
    """

    partition_of: IntArray
    """Partition of each operator. Length n."""
    devices_of_partition: tuple[tuple[int, ...], ...]
    """Logical ids of the devices that hold each partition, in round-robin order; never empty, no
    duplicates."""

    def __post_init__(self) -> None:
        """Refuse partitions without a device or an operator, and round-robin periods too long."""
        count = len(self.devices_of_partition)
        for partition, devices in enumerate(self.devices_of_partition):
            if not isinstance(devices, tuple):
                raise SpecError(
                    f"partition {partition} has devices={devices!r}, which must be a tuple of"
                    " logical ids, such as (0,)"
                )
            if not devices:
                raise SpecError(f"partition {partition} has no device")
            if len(set(devices)) < len(devices):
                raise SpecError(
                    f"partition {partition} is on devices {', '.join(map(str, devices))}, one of"
                    " them twice; name each once"
                )
        used_partitions = np.unique(self.partition_of)
        if not np.array_equal(used_partitions, np.arange(count)):
            raise SpecError(
                f"partitions must be numbered 0..{count - 1} with an operator in each,"
                f" got {len(used_partitions)} in use"
            )
        if self.rounds > MOST_ROUNDS:
            counts = sorted({len(devices) for devices in self.devices_of_partition})
            raise SpecError(
                f"replicas in numbers of {', '.join(map(str, counts))} take turns that repeat only"
                f" after {self.rounds} inputs, more than {MOST_ROUNDS}; give partitions numbers of"
                " devices that divide each other"
            )

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.devices_of_partition)

    @property
    def rounds(self) -> int:
        """Period of the joint round-robin of all replicas, in inputs; 1 without replicas."""
        return math.lcm(*(len(devices) for devices in self.devices_of_partition))

    @property
    def replicas(self) -> int:
        """The largest number of replicas of any partition."""
        return max(len(devices) for devices in self.devices_of_partition)

    @property
    def device_of(self) -> IntArray:
        """Logical id of the device that runs each operator for the first input. Length n."""
        return self.device_of_round(0)

    def device_of_round(self, index: int) -> IntArray:
        """Return the device that runs each operator for input `index`. Length n."""
        homes = [devices[index % len(devices)] for devices in self.devices_of_partition]
        return np.array(homes, dtype=np.int64)[self.partition_of]

    def check_for(self, n_ops: int, n_devices: int | None = None) -> None:
        """Check that this is a placement of `n_ops` operators, on `n_devices` devices if given.

        Raises:
            SpecError: if it is for another graph or uses devices that do not exist.

        """
        if len(self.partition_of) != n_ops:
            raise SpecError(
                f"the assignment places {len(self.partition_of)} operators, the model has {n_ops};"
                " make it for this model"
            )
        named = sorted({device for devices in self.devices_of_partition for device in devices})
        for device in named:
            if device < 0 or (n_devices is not None and device >= n_devices):
                there_are = "" if n_devices is None else f", there are {n_devices}"
                raise SpecError(
                    f"the assignment uses device {device}{there_are}; make it for these devices"
                )

    def holds(self, device: int) -> IntArray:
        """Return the partitions on `device`, in order."""
        partitions = [p for p, devices in enumerate(self.devices_of_partition) if device in devices]
        return np.array(partitions, dtype=np.int64)
