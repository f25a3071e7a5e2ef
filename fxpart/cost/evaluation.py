"""`Evaluation`: what one assignment costs on one topology; `fxpart.cost.evaluate` makes it."""

from dataclasses import dataclass

from fxpart.core.graph import FloatArray, IntArray

__all__ = ["DeviceUse", "Evaluation", "MemoryProfile", "Transfers"]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device holds, and does for one input: of partitions in turn, the average."""

    logical_id: int
    name: str
    operators: int
    """Operators of its partitions."""
    partitions: tuple[int, ...]
    """Partitions that the device holds, in order, replicas included."""
    weight_bytes: int
    """Of all its partitions."""
    state_bytes: int
    """What an optimizer keeps for those weights."""
    peak_bytes: int
    """Weights with their optimizer state, inputs read here, and the most bytes of tensors alive at
    once (liveness memory), in the round in which those are most."""
    static_bytes: int
    """Weights with their state plus everything made or received here, as if nothing were ever
    freed."""
    memory_bytes: int
    """What tensors may take."""
    reserved_bytes: int
    """What the device has beside that."""
    load_s: float
    """Time that the device computes for one input."""
    received_bytes: int
    """For one input."""
    cache_bytes: int = 0
    """What its operators keep of texts from one token to the next; a part of the peak."""

    @property
    def free_bytes(self) -> int:
        """Memory left for tensors at the peak."""
        return self.memory_bytes - self.peak_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        return self.memory_bytes + self.reserved_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Transfers:
    """Every transfer of the first input, in the order of sending. Arrays of equal length."""

    value: IntArray
    source: IntArray
    target: IntArray
    start_s: FloatArray
    finish_s: FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class MemoryProfile:
    """Bytes held on one device while each of its operators runs, for the first input."""

    op: IntArray
    """Operators that the device computes for the first input, in order; none for a replica that
    waits for its turn."""
    start_s: FloatArray
    """Simulated start of each of them."""
    held_bytes: IntArray
    """Weights with their optimizer state, inputs and live tensors while it runs."""


@dataclass(frozen=True, eq=False, slots=True)
class Evaluation:
    """Predicted cost of an assignment."""

    latency_s: float
    """Simulated latency of the first input through the whole model."""
    throughput_per_s: float
    """Inputs per second in a stream: 1 / the largest load of any device or link, which is that of
    `rounds` inputs divided by their number."""
    load_bound_s: float
    """No placement of whole operators on this topology has a lower largest load."""
    critical_path_s: float
    """Longest path, transfers included, as if a device ran any number of operators at once."""
    lower_bound_s: float
    """No placement of whole operators on this topology has a lower latency."""
    transfer_bytes: int
    """Bytes sent between devices for one input, the average of all rounds."""
    partitions: int
    rounds: int
    """Inputs after which the turns of all replicas come round; 1 without replicas."""
    replicas: int
    """Devices that hold the partition with the most replicas; 1 without replicas."""
    devices: tuple[DeviceUse, ...]
    """One entry for each device of the topology, used or not."""
    op_start_s: FloatArray
    op_finish_s: FloatArray
    transfers: Transfers
    memory: tuple[MemoryProfile, ...]
    """One profile for each device of the topology."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any device."""
        return max(device.peak_bytes for device in self.devices)

    @property
    def devices_used(self) -> int:
        """Number of devices that compute anything, in whatever round."""
        return sum(1 for device in self.devices if device.operators)

    @property
    def load_s(self) -> float:
        """The largest load of any device or link for one input."""
        return 1.0 / self.throughput_per_s if self.throughput_per_s else float("inf")

    @property
    def load_gap(self) -> float:
        """The largest load over its lower bound, less one."""
        if self.load_bound_s <= 0:
            return 0.0
        return max(0.0, self.load_s / self.load_bound_s - 1.0)

    @property
    def optimality_gap(self) -> float:
        """Latency over the lower bound, less one: 0.1 is at most 10 % from the best possible."""
        if self.lower_bound_s <= 0:
            return 0.0
        # The two are sums in different order: rounding must not show as a gap below zero.
        return max(0.0, self.latency_s / self.lower_bound_s - 1.0)
