"""What of a device's memory is not for tensors, and what the allocator adds to those.

Named parts, each a setting; what is typical of a CUDA device stands with its source in
``conf/reserve/cuda.yaml``. What a device takes whatever is placed on it goes off its memory before
anything is placed, so every mode goes by what is left. What depends on the plan is worked out for
it afterwards: `fxpart.cost.device_memory`.
"""

import math
from dataclasses import dataclass, replace

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import DeviceSpec
from fxpart.errors import SpecError, show_bytes

__all__ = ["Interval", "Reserve", "rounded", "with_reserve"]

_MOST_FRAGMENTATION = 0.9
_MOST_SHARE = 100.0
EXACT = (1.0, 1.0)
"""The range of a part that is known."""
MOST_ROUNDING_BYTES = 2**40
"""Allocators round up to 512 bytes, or to pages of 2 MiB; the sum of 2^22 tensors is counted."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that are not known exactly: at least, as expected, at most."""

    low: int
    expected: int
    high: int

    def __post_init__(self) -> None:
        """Refuse limits in another order."""
        if not 0 <= self.low <= self.expected <= self.high:
            raise SpecError(
                f"an interval ascends from 0, got {self.low}, {self.expected}, {self.high}"
            )

    def __add__(self, other: "Interval") -> "Interval":
        """Return the interval of the sum, as if both were at their ends at once."""
        return Interval(
            self.low + other.low, self.expected + other.expected, self.high + other.high
        )

    def times(self, factor: int) -> "Interval":
        """Return the interval of `factor` such parts."""
        return Interval(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Reserve:
    """What one process takes of a device beside its tensors. The default takes nothing.

    A ``range`` is the least and the most that a part may be, as factors of what is expected.
    """

    context_bytes: int = 0
    """The driver's context and the kernels that are loaded into it."""
    workspace_bytes: int = 0
    """What libraries keep for themselves, such as the workspaces of cuBLAS."""
    rounding_bytes: int = 1
    """The allocator rounds every tensor up to a multiple of this; see `rounded`."""
    fragmentation: float = 0.0
    """Share of what is left then that lies in gaps too small to use."""
    context_range: tuple[float, float] = EXACT
    workspace_range: tuple[float, float] = EXACT
    nccl_peer_bytes: int = 0
    """Buffers for each device with which a process exchanges tensors."""
    nccl_peer_range: tuple[float, float] = EXACT
    convolution_workspace: float = 0.0
    """What a convolution takes while it runs, as a share of the bytes that it reads and writes."""
    convolution_workspace_range: tuple[float, float] = EXACT
    caching_allocator: bool = False
    """Whether torch's allocator keeps what is freed: `fxpart.cost.caching_allocator`."""
    allocator_error: float = 0.0
    """By how much of what tensors take, at most, the allocator may take more or less than that
    simulation says."""

    def __post_init__(self) -> None:
        """Refuse what no device can have."""
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
        """Return what is known of `part`: ``context``, ``workspace`` or ``nccl_peer``."""
        expected: int = getattr(self, f"{part}_bytes")
        low, high = getattr(self, f"{part}_range")
        return Interval(int(expected * low), expected, math.ceil(expected * high))

    @property
    def convolution_shares(self) -> tuple[float, float, float]:
        """The least, the expected and the largest `convolution_workspace`."""
        low, high = self.convolution_workspace_range
        share = self.convolution_workspace
        return share * low, share, share * high

    @property
    def fixed_bytes(self) -> int:
        """What is taken of every device, however large it is."""
        return self.context_bytes + self.workspace_bytes

    def reserved_bytes(self, total_bytes: int) -> int:
        """Return what is taken of a device with `total_bytes` of memory."""
        left = max(0, total_bytes - self.fixed_bytes)
        return self.fixed_bytes + math.ceil(left * self.fragmentation)


def _refuse_range(name: str, factors: tuple[float, ...]) -> None:
    if len(factors) != 2 or not 0 <= factors[0] <= 1 <= factors[1] <= _MOST_SHARE:
        raise SpecError(
            f"{name} must be two factors of what is expected, from 0 to 1 and from 1 to"
            f" {_MOST_SHARE:g}, got {list(factors)}"
        )


def with_reserve(device: DeviceSpec, reserve: Reserve) -> DeviceSpec:
    """Return `device` with that much less memory for tensors; what it had reserved before counts.

    Raises:
        SpecError: when nothing is left.

    """
    reserved = reserve.reserved_bytes(device.memory_bytes)
    if reserved >= device.memory_bytes:
        raise SpecError(
            f"device {device.name} has {show_bytes(device.memory_bytes)}, its reserve alone takes"
            f" {show_bytes(reserved)} (context {show_bytes(reserve.context_bytes)}, workspace"
            f" {show_bytes(reserve.workspace_bytes)}); take a larger device, or reserve=none"
        )
    return replace(
        device,
        memory_bytes=device.memory_bytes - reserved,
        reserved_bytes=device.reserved_bytes + reserved,
    )


def rounded(graph: OpGraph, rounding_bytes: int) -> OpGraph:
    """Return `graph` with every allocation rounded up to a multiple of `rounding_bytes`.

    Weights, each tensor that is kept for one, and the storages of values are; what a transfer
    carries is not. Zero bytes stay zero.

    Raises:
        SpecError: for a multiple below 1 or above `MOST_ROUNDING_BYTES`, and for sums of sizes
            that are not counted.

    """
    _refuse_multiple("rounding_bytes", rounding_bytes)
    if rounding_bytes == 1:
        return graph
    tensors = _up(graph.state_tensor_bytes, rounding_bytes)
    return replace(
        graph,
        weight_bytes=_up(graph.weight_bytes, rounding_bytes),
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
