"""Device memory that is not available to tensors, and the allocator's overhead on them.

Each part is a setting; typical values for CUDA devices are in ``conf/reserve/cuda.yaml`` with their
sources. What is taken regardless of the placement is subtracted from a device's memory before
anything is placed, so every mode sees what remains. What depends on the plan is computed
afterwards: `fxpart.cost.device_memory`.
"""

import math
from dataclasses import dataclass, replace

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import DeviceSpec
from fxpart.errors import InfeasibleError, SpecError, show_bytes

__all__ = ["Interval", "Reserve", "rounded", "with_reserve"]

_MOST_FRAGMENTATION = 0.9
_MOST_SHARE = 100.0
EXACT = (1.0, 1.0)
"""The range of a part that is known exactly."""
MOST_ROUNDING_BYTES = 2**40
"""Allocators round to 512 bytes or to 2 MiB pages; this keeps sums over 2^22 tensors countable."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An uncertain number of bytes: lower limit, expected value, upper limit."""

    low: int
    expected: int
    high: int

    def __post_init__(self) -> None:
        """Refuse limits that are out of order."""
        if not 0 <= self.low <= self.expected <= self.high:
            raise SpecError(
                f"an interval ascends from 0, got {self.low}, {self.expected}, {self.high}"
            )

    def __add__(self, other: "Interval") -> "Interval":
        """Return the interval of the sum, whose ends are the sums of the ends."""
        return Interval(
            self.low + other.low, self.expected + other.expected, self.high + other.high
        )

    def times(self, factor: int) -> "Interval":
        """Return the interval of `factor` such parts."""
        return Interval(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory that one process takes of a device besides its tensors. The default is nothing.

    A ``range`` gives the limits of a part as factors of its expected value.
    """

    context_bytes: int = 0
    """The driver's context and the kernels loaded into it."""
    workspace_bytes: int = 0
    """Memory kept by libraries, such as cuBLAS workspaces."""
    rounding_bytes: int = 1
    """Every tensor is rounded up to a multiple of this; see `rounded`."""
    fragmentation: float = 0.0
    """Share of the remaining memory lost to gaps too small to use."""
    context_range: tuple[float, float] = EXACT
    workspace_range: tuple[float, float] = EXACT
    nccl_peer_bytes: int = 0
    """Buffers per device with which a process exchanges tensors."""
    nccl_peer_range: tuple[float, float] = EXACT
    convolution_workspace: float = 0.0
    """Workspace of a running convolution, as a share of the bytes that it reads and writes."""
    convolution_workspace_range: tuple[float, float] = EXACT
    caching_allocator: bool = False
    """Whether torch's allocator caches freed memory: `fxpart.cost.caching_allocator`."""
    allocator_error: float = 0.0
    """Largest error of the simulated allocator in either direction, as a share of the bytes of
    tensors."""
    upper_limits: bool = False
    """Whether the upper limit of every part counts as its expected value."""

    def __post_init__(self) -> None:
        """Refuse negative or absurdly large parts."""
        for name in ("context_bytes", "workspace_bytes", "nccl_peer_bytes"):
            if getattr(self, name) < 0:
                raise SpecError(f"reserve.{name} must be at least 0, got {getattr(self, name)}")
            if getattr(self, name) > MAX_MEMORY_BYTES:
                raise SpecError(
                    f"reserve.{name} must be at most {show_bytes(MAX_MEMORY_BYTES)}, got"
                    f" {show_bytes(getattr(self, name))}"
                )
        _refuse_multiple("reserve.rounding_bytes", self.rounding_bytes)
        if not 0 <= self.fragmentation <= _MOST_FRAGMENTATION:
            raise SpecError(
                f"reserve.fragmentation must be a share from 0 to {_MOST_FRAGMENTATION}, got"
                f" {self.fragmentation}"
            )
        for name in ("convolution_workspace", "allocator_error"):
            if not 0 <= getattr(self, name) <= _MOST_SHARE:
                raise SpecError(
                    f"reserve.{name} must be a share from 0 to {_MOST_SHARE:g}, got"
                    f" {getattr(self, name)}"
                )
        for name in ("context", "workspace", "nccl_peer", "convolution_workspace"):
            _refuse_range(f"reserve.{name}_range", getattr(self, f"{name}_range"))

    def interval(self, part: str) -> Interval:
        """Return the interval of a part: ``context``, ``workspace`` or ``nccl_peer``."""
        expected: int = getattr(self, f"{part}_bytes")
        low, high = getattr(self, f"{part}_range")
        return self.counted(Interval(int(expected * low), expected, math.ceil(expected * high)))

    def counted(self, size: Interval) -> Interval:
        """Return the interval of a part as it counts, with its upper limit if so chosen."""
        return replace(size, expected=size.high) if self.upper_limits else size

    @property
    def convolution_shares(self) -> tuple[float, float, float]:
        """The lowest, expected and highest `convolution_workspace`."""
        low, high = self.convolution_workspace_range
        share = self.convolution_workspace
        return share * low, share, share * high

    @property
    def fixed_bytes(self) -> int:
        """Bytes taken of every device, regardless of its size."""
        return self.interval("context").expected + self.interval("workspace").expected

    def reserved_bytes(self, total_bytes: int) -> int:
        """Return the bytes reserved on a device with `total_bytes` of memory."""
        remaining = max(0, total_bytes - self.fixed_bytes)
        return self.fixed_bytes + math.ceil(remaining * self.fragmentation)


def _refuse_range(name: str, factors: tuple[float, ...]) -> None:
    if len(factors) != 2 or not 0 <= factors[0] <= 1 <= factors[1] <= _MOST_SHARE:
        raise SpecError(
            f"{name} must be two factors of what is expected, from 0 to 1 and from 1 to"
            f" {_MOST_SHARE:g}, got {list(factors)}"
        )


def with_reserve(device: DeviceSpec, reserve: Reserve) -> DeviceSpec:
    """Return `device` with the reserve subtracted from its memory, on top of any earlier one.

    Raises:
        InfeasibleError: if no memory remains.

    """
    reserved = reserve.reserved_bytes(device.memory_bytes)
    if reserved >= device.memory_bytes:
        raise InfeasibleError(
            f"device {device.name} has {show_bytes(device.memory_bytes)}, but its reserve alone "
            f"takes {show_bytes(reserved)} (driver context"
            f" {show_bytes(reserve.interval('context').expected)}, workspace"
            f" {show_bytes(reserve.interval('workspace').expected)}); take a larger device, or"
            " reserve=none",
            needed_bytes=reserved,
            available_bytes=device.memory_bytes,
        )
    return replace(
        device,
        memory_bytes=device.memory_bytes - reserved,
        reserved_bytes=device.reserved_bytes + reserved,
    )


def rounded(graph: OpGraph, rounding_bytes: int) -> OpGraph:
    """Return `graph` with every allocation rounded up to a multiple of `rounding_bytes`.

    This applies to weights, each tensor of their state, and the storages of values, but not to the
    bytes of transfers. Zero bytes stay zero.

    Raises:
        SpecError: if the multiple is below 1 or above `MOST_ROUNDING_BYTES`, or a sum of sizes
            exceeds `fxpart.core.graph.MOST_COUNTED`.

    """
    _refuse_multiple("rounding_bytes", rounding_bytes)
    if rounding_bytes == 1:
        return graph
    tensors = _up(graph.state_tensor_bytes, rounding_bytes)
    return replace(
        graph,
        weight_bytes=_up(graph.weight_bytes, rounding_bytes),
        unread_weight_bytes=_up(graph.unread_weight_bytes, rounding_bytes),
        weight_state_bytes=tensors.sum(axis=0)
        if len(tensors)
        else _up(graph.weight_state_bytes, rounding_bytes),
        state_tensor_bytes=tensors,
        value_alloc_bytes=_up(graph.value_alloc_bytes, rounding_bytes),
    )


def _refuse_multiple(name: str, rounding_bytes: int) -> None:
    if not 1 <= rounding_bytes <= MOST_ROUNDING_BYTES:
        raise SpecError(
            f"{name} must be from 1, which rounds nothing, to {MOST_ROUNDING_BYTES} (1 TiB), got"
            f" {rounding_bytes}"
        )


def _up(sizes: IntArray, multiple: int) -> IntArray:
    rounded_sizes: IntArray = -(-sizes // multiple) * multiple
    return rounded_sizes
