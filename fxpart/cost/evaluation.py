"""`Evaluation`: the predicted cost of an assignment on a topology, made by `evaluate`."""

from dataclasses import dataclass

from fxpart.core.graph import FloatArray, IntArray

__all__ = ["DeviceUse", "Evaluation", "MemoryProfile", "Transfers"]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory and work of one device for one input, averaged over rounds for replicas."""

    logical_id: int
    name: str
    operators: int
    """Number of operators in its partitions."""
    partitions: tuple[int, ...]
    """Partitions on the device, in order, including replicas."""
    weight_bytes: int
    """Weights of all its partitions."""
    state_bytes: int
    """Optimizer state of those weights."""
    peak_bytes: int
    """Weights with their optimizer state, inputs read here, and the peak of live tensors (liveness
    memory) in the worst round."""
    static_bytes: int
    """Weights with their state plus everything produced or received here, as if nothing were ever
    freed."""
    memory_bytes: int
    """Memory available to tensors."""
    reserved_bytes: int
    """Memory that is not available to tensors."""
    load_s: float
    """Compute time for one input."""
    received_bytes: int
    """Bytes received for one input."""
    cache_bytes: int = 0
    """KV cache and other state of its operators between tokens; included in the peak."""

    @property
    def free_bytes(self) -> int:
        """Memory that is free at the peak."""
        return self.memory_bytes - self.peak_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        return self.memory_bytes + self.reserved_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Transfers:
    """All transfers of the first input, in sending order. Arrays of equal length."""

    value: IntArray
    source: IntArray
    target: IntArray
    start_s: FloatArray
    finish_s: FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class MemoryProfile:
    """Memory in use on one device while each of its operators runs, for the first input."""

    op: IntArray
    """Operators that the device runs for the first input, in order; empty for a replica that waits
    for its turn."""
    start_s: FloatArray
    """Simulated start of each operator."""
    held_bytes: IntArray
    """Weights with their optimizer state, inputs and live tensors at each operator."""


@dataclass(frozen=True, eq=False, slots=True)
class Evaluation:
    """Predicted cost of an assignment."""

    latency_s: float
    """Simulated latency of the first input through the whole model."""
    throughput_per_s: float
    """Steady-state inputs per second: 1 / the largest load of any device or link, averaged over
    `rounds` inputs."""
    load_bound_s: float
    """Lower bound of the largest load, over all placements of whole operators on this topology."""
    critical_path_s: float
    """Longest path including transfers, if devices ran any number of operators at once."""
    lower_bound_s: float
    """Lower bound of the latency, over all placements of whole operators on this topology."""
    transfer_bytes: int
    """Bytes sent between devices for one input, averaged over rounds."""
    partitions: int
    rounds: int
    """Period of the round-robin over replicas, in inputs; 1 without replicas."""
    replicas: int
    """Largest number of replicas of any partition; 1 without replicas."""
    devices: tuple[DeviceUse, ...]
    """One entry per device of the topology, used or not."""
    op_start_s: FloatArray
    op_finish_s: FloatArray
    transfers: Transfers
    memory: tuple[MemoryProfile, ...]
    """One profile per device of the topology."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any device."""
        return max(device.peak_bytes for device in self.devices)

    @property
    def devices_used(self) -> int:
        """Number of devices that compute anything in any round."""
        return sum(1 for device in self.devices if device.operators)

    @property
    def load_s(self) -> float:
        """The largest load of any device or link for one input."""
        return 1.0 / self.throughput_per_s if self.throughput_per_s else float("inf")

    @property
    def load_gap(self) -> float:
        """The largest load relative to its lower bound, minus one."""
        if self.load_bound_s <= 0:
            return 0.0
        return max(0.0, self.load_s / self.load_bound_s - 1.0)

    @property
    def optimality_gap(self) -> float:
        """Latency relative to its lower bound, minus one: 0.1 is within 10 % of the optimum."""
        if self.lower_bound_s <= 0:
            return 0.0
        # The sums are in different orders, so rounding could make the gap negative.
        return max(0.0, self.latency_s / self.lower_bound_s - 1.0)
