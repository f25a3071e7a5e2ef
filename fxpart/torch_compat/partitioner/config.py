"""`PartitionerConfig` and its parts: devices, latencies and modes, with the fields of torch."""

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


class ConfigError(SpecError, RuntimeError):
    """An unusable `PartitionerConfig`, device or mapping.

    Also a ``RuntimeError``, which callers of torch's partitioner catch.
    """


class Device(NamedTuple):
    """One accelerator."""

    name: str
    available_mem_bytes: int
    """Memory for weights and tensors, in bytes."""
    logical_id: int
    """The unique number of the device in results."""


class NodeLatency(NamedTuple):
    """Latency of one operator, in seconds. The larger of the two counts."""

    mem_latency_sec: float
    """Time bound by memory bandwidth."""
    computer_latency_sec: float
    """Time bound by computation."""


class PartitionLatency(NamedTuple):
    """Sums along the critical path of a partition, in seconds."""

    mem_latency_sec: float
    computer_latency_sec: float
    overall_latency_sec: float
    """Sum of the larger latency of each operator on the path."""


class PartitionMode(Enum):
    """The method of choosing partitions."""

    size_based = 0
    sparse_nn = 1
    cost_aware = 2
    kl_based = 3
    aot_based = 4


class PartitionerConfig(NamedTuple):
    """Devices, mode and options of `Partitioner.partition_graph`."""

    devices: list[Device]
    mode: PartitionMode = PartitionMode.size_based
    transfer_rate_bytes_per_sec: float = 0.0
    """Transfer rate between two devices; required by cost_aware and kl_based."""
    node_to_latency_mapping: dict["Node", NodeLatency] = {}  # noqa: RUF012 - as in torch
    """Latency of each operator; required by cost_aware and kl_based."""
    node_to_partition_mapping: dict["Node", int] = {}  # noqa: RUF012 - as in torch
    """Partition of each operator, for aot_based."""
    partition_to_logical_device_mapping: dict[int, list[int]] = {}  # noqa: RUF012 - as in torch
    """Logical ids of the devices of each partition, for aot_based."""
    saturate_host: bool = False
    """Whether to replicate all partitions on idle devices, as often as they fit."""
