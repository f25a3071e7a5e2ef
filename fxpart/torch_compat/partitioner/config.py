"""What a caller of the partitioner says: devices, latencies, a mode. Fields as in torch."""

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from fxpart.errors import SpecError

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = [
    "ConfigError",
    "Device",
    "NodeLatency",
    "PartitionLatency",
    "PartitionMode",
    "PartitionerConfig",
]


class Device(NamedTuple):
    """One accelerator."""

    name: str
    available_mem_bytes: int
    """Memory for weights and tensors, in bytes."""
    logical_id: int
    """The number that results name the device by; each device has its own."""


class NodeLatency(NamedTuple):
    """How long one operator takes, in seconds. The larger of the two counts."""

    mem_latency_sec: float
    """Time that the memory's bandwidth alone would ask for."""
    computer_latency_sec: float
    """Time that the computation alone would ask for."""


class PartitionLatency(NamedTuple):
    """Sums along the critical path of a partition, in seconds."""

    mem_latency_sec: float
    computer_latency_sec: float
    overall_latency_sec: float
    """Sum of the larger latency of each operator on the path."""


class PartitionMode(Enum):
    """How partitions are chosen."""

    size_based = 0
    sparse_nn = 1
    cost_aware = 2
    kl_based = 3
    aot_based = 4


class PartitionerConfig(NamedTuple):
    """What `Partitioner.partition_graph` is asked for."""

    devices: list[Device]
    mode: PartitionMode = PartitionMode.size_based
    transfer_rate_bytes_per_sec: float = 0.0
    """Rate of a transfer between two devices; asked for by cost_aware and kl_based."""
    node_to_latency_mapping: dict["Node", NodeLatency] = {}  # noqa: RUF012 - as in torch
    """Latency of each operator; asked for by cost_aware and kl_based."""
    node_to_partition_mapping: dict["Node", int] = {}  # noqa: RUF012 - as in torch
    """Partition of each operator, for aot_based."""
    partition_to_logical_device_mapping: dict[int, list[int]] = {}  # noqa: RUF012 - as in torch
    """Logical ids of the devices of each partition, for aot_based."""
    saturate_host: bool = False
    """Whether to replicate all partitions on idle devices, as often as these hold them."""


# What is wrong with a configuration: a `SpecError` that torch's callers can catch too.


class ConfigError(SpecError, RuntimeError):
    """A `PartitionerConfig`, device or mapping that cannot be used as it is.

    Also a ``RuntimeError``: that is what callers of torch's partitioner catch.
    """
