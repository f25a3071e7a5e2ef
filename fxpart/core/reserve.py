"""What of a device's memory is not for tensors, and what the allocator adds to those.

Four named parts, each a setting; what is typical of a CUDA device stands with its source in
``conf/reserve/cuda.yaml``. A reserve takes memory away before anything is placed, so every mode and
every check goes by what is left.
"""

import math
from dataclasses import dataclass, replace

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import DeviceSpec
from fxpart.errors import SpecError, show_bytes

__all__ = ["Reserve", "rounded", "with_reserve"]

_MOST_FRAGMENTATION = 0.9
MOST_ROUNDING_BYTES = 2**40
"""Allocators round up to 512 bytes, or to pages of 2 MiB; the sum of 2^22 tensors is counted."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """What one process takes of a device beside its tensors. The default takes nothing."""

    context_bytes: int = 0
    """The driver's context and the kernels that are loaded into it."""
    workspace_bytes: int = 0
    """What libraries keep for themselves, such as the workspaces of cuBLAS."""
    rounding_bytes: int = 1
    """The allocator rounds every tensor up to a multiple of this; see `rounded`."""
    fragmentation: float = 0.0
    """Share of what is left then that lies in gaps too small to use."""

    def __post_init__(self) -> None:
        """Refuse what no device can have."""
        for name in ("context_bytes", "workspace_bytes"):
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

    @property
    def fixed_bytes(self) -> int:
        """What is taken of every device, however large it is."""
        return self.context_bytes + self.workspace_bytes

    def reserved_bytes(self, total_bytes: int) -> int:
        """Return what is taken of a device with `total_bytes` of memory."""
        left = max(0, total_bytes - self.fixed_bytes)
        return self.fixed_bytes + math.ceil(left * self.fragmentation)


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
