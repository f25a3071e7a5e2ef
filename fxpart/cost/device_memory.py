"""`DeviceMemory`: the total memory that a plan needs on a device, by part, and whether it fits.

`Evaluation` counts only tensors. The other parts are workspaces of kernels and libraries, memory
cached by torch's allocator, NCCL buffers, and the context; ``nvidia-smi`` shows the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.reserve import Interval, Reserve
from fxpart.cost.peak_tensors import storages_at_peak
from fxpart.cost.problem import Problem
from fxpart.cost.reservation import reservation
from fxpart.cost.storage_kinds import Storages

__all__ = ["CONTEXT", "PARTS", "DeviceMemory", "Verdict", "convolution_bytes", "device_memory_of"]

BoolArray = npt.NDArray[np.bool_]

CONTEXT = "driver context"

PARTS = {
    "tensors": "what the plan holds at its peak, as the allocator rounds it; the limits, if its"
    " partitions run one after another",
    "unread weights": "that no operator reads, of a model on one device",
    "kept gradients": "of a weight of each shape, that Transformer Engine returns and keeps",
    "kernel workspaces": "of the operator that runs then: cuDNN's convolutions",
    "allocator": "segments that torch's allocator keeps beyond what it hands out",
    "library workspaces": "of cuBLAS, for each handle and stream",
    "communication": "buffers of NCCL, for each device that tensors are exchanged with",
    CONTEXT: "the CUDA or HIP context, and loaded kernels",
}
"""Descriptions of the parts, in order."""

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OVERLAP = 1.1
"""Products per input element above which windows overlap; it is 1 if each is read once."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that a plan needs on one device."""

    device: int
    """Logical id."""
    parts: Mapping[str, Interval]
    """Nonzero parts, in the order of `PARTS`."""
    total_bytes: int
    """Memory of the device."""

    @property
    def needed(self) -> Interval:
        """The sum of all parts."""
        return sum(self.parts.values(), start=Interval(0, 0, 0))

    @property
    def verdict(self) -> Verdict:
        """``fits`` if the upper limit fits, ``tight`` if only the expected value does."""
        needed = self.needed
        if needed.expected > self.total_bytes:
            return "does not fit"
        return "fits" if needed.high <= self.total_bytes else "tight"

    @property
    def decided_by(self) -> str:
        """The part that decides a verdict other than ``fits``, otherwise ``""``.

        If the plan does not fit, it is the first part that exceeds the memory; if it is tight, the
        part that may exceed its expected value by most.
        """
        if self.verdict == "fits":
            return ""
        if self.verdict == "tight":
            return max(self.parts, key=lambda p: self.parts[p].high - self.parts[p].expected)
        used_bytes = 0
        for part, size in self.parts.items():
            used_bytes += size.expected
            if used_bytes > self.total_bytes:
                return part
        raise AssertionError("parts that do not fit fill the device")


def device_memory_of(
    problem: Problem,
    assignment: Assignment,
    reserves: Sequence[Reserve],
    *,
    tensor_bytes: Mapping[int, int],
    peers: Mapping[int, int],
    kept_bytes: Mapping[int, int] | None = None,
) -> tuple[DeviceMemory, ...]:
    """Return the memory needed on each device in use, in the order of logical ids.

    Args:
        problem: a problem whose graph has sizes as rounded by the allocator.
        assignment: an assignment for it.
        reserves: the reserve of each device of the topology.
        tensor_bytes: peak of the plan's tensors on each device. If it exceeds that of one input,
            because of microbatches in flight, the allocator caches the same share as for one.
        peers: number of devices with which each exchanges tensors, if processes do.
        kept_bytes: memory that an engine keeps on each device besides the plan's tensors, if any.

    """
    needs = []
    used_devices = np.unique(assignment.device_of)
    unread_bytes = _unread_bytes(problem.graph) if len(used_devices) == 1 else 0
    needs_workspace = any(r.caching_allocator or r.convolution_workspace for r in reserves)
    convolved = convolution_bytes(problem.graph) if needs_workspace else np.zeros(1, np.int64)
    for device, device_of, storages, op in storages_at_peak(problem, assignment):
        reserve = reserves[device]
        engine_bytes = (kept_bytes or {}).get(device, 0)
        # Without a reserve, only what the plan places counts.
        beside_bytes = unread_bytes if reserve != Reserve() else 0
        parts = {
            "kept gradients": Interval(engine_bytes, engine_bytes, engine_bytes),
            "unread weights": Interval(beside_bytes, beside_bytes, beside_bytes),
            "library workspaces": reserve.interval("workspace"),
            "communication": reserve.interval("nccl_peer").times(peers.get(device, 0)),
            CONTEXT: reserve.interval("context"),
        }
        total_bytes = problem.topology.devices[device].total_bytes
        room_bytes = total_bytes - sum(size.expected for size in parts.values())
        one_input = _InputStorages(
            storages,
            int(storages.size_bytes[storages.at(op)].sum()),
            storages.peak_bytes_in_turn(assignment.partition_of),
        )
        convolved_here = np.where(device_of == device, convolved, 0)
        allocator_parts = _allocator_parts(
            problem.graph, one_input, convolved_here, reserve, (tensor_bytes[device], room_bytes)
        )
        all_parts = allocator_parts | parts
        parts = {
            part: reserve.counted(all_parts[part])
            for part in PARTS
            if part in all_parts and all_parts[part].high
        }
        needs.append(DeviceMemory(device, parts, total_bytes))
    return tuple(needs)


def _unread_bytes(graph: OpGraph) -> int:
    """Return the bytes of the weights that no operator reads."""
    is_read = np.zeros(len(graph.weight_bytes), dtype=np.bool_)
    is_read[graph.uses] = True
    return int(graph.weight_bytes[~is_read].sum() + graph.unread_weight_bytes.sum())


@dataclass(frozen=True, eq=False, slots=True)
class _InputStorages:
    """Storages of one input on a device."""

    storages: Storages
    peak_bytes: int
    """Peak with operators in graph order."""
    in_turn_bytes: int
    """Peak with partitions one after another."""


def _allocator_parts(
    graph: OpGraph,
    one_input: _InputStorages,
    convolved: IntArray,
    reserve: Reserve,
    sizes_bytes: tuple[int, int],
) -> dict[str, Interval]:
    """Return the parts that torch's allocator takes of a device.

    Args:
        graph: a graph with sizes as rounded by the allocator.
        one_input: the storages of one input.
        convolved: `convolution_bytes` of the operators on the device, 0 for others.
        reserve: the reserve of the device.
        sizes_bytes: peak of the plan's tensors, and the memory available to them.

    """
    tensors, available_bytes = sizes_bytes
    beyond_bytes = one_input.in_turn_bytes - one_input.peak_bytes
    parts = {
        "tensors": Interval(tensors + min(0, beyond_bytes), tensors, tensors + max(0, beyond_bytes))
    }
    if not (reserve.caching_allocator or reserve.convolution_workspace):
        return parts
    low, expected, high = (
        (share * convolved).astype(np.int64) for share in reserve.convolution_shares
    )
    limit_bytes = available_bytes - max(0, tensors - one_input.peak_bytes)
    run = reservation(graph, one_input.storages, expected, limit_bytes)
    kernels = max(0, run.allocated_bytes - one_input.peak_bytes)
    upper_bytes = max(kernels, int(high.max()))
    parts["kernel workspaces"] = Interval(min(kernels, int(low.max())), kernels, upper_bytes)
    if reserve.caching_allocator:
        cached_bytes = run.reserved_bytes - run.allocated_bytes
        # Several inputs cache the same share, as far as memory allows: the rest is released.
        scaled_bytes = round(cached_bytes * max(1.0, tensors / max(one_input.peak_bytes, 1)))
        cached_bytes = max(cached_bytes, min(scaled_bytes, available_bytes - tensors - kernels))
        spread = round(reserve.allocator_error * tensors)
        parts["allocator"] = Interval(
            max(0, cached_bytes - spread), cached_bytes, cached_bytes + spread
        )
    return parts


def convolution_bytes(graph: OpGraph) -> IntArray:
    """Return the bytes to which each operator's workspace is proportional; shape (n,).

    For a convolution with overlapping windows, forward or backward, these are the bytes that it
    reads and writes: cuDNN copies them into the layout of matrix units or into Winograd tiles. A
    convolution that reads each element once is a matrix product, and a depthwise one runs in place.
    All other operators have their temporaries in the graph, or none of note.
    """
    return np.where(_windows_overlap(graph), graph.moved_bytes, 0)


def _windows_overlap(graph: OpGraph) -> BoolArray:
    """Return whether each operator is a convolution with overlapping windows; shape (n,).

    Per output channel, each input element is used in k^2 / (groups x stride^2) products. This ratio
    follows from sizes and FLOPs: a convolution with f FLOPs in a dtype of b bytes, with input x,
    weight w and result y (in bytes), has a ratio of f^2 b^3 / (4 x w y).
    """
    overlap = np.zeros(graph.n_ops, dtype=np.bool_)
    forward_of = graph.forward_of
    for op in range(graph.n_ops):
        if "convolution" not in graph.targets[op]:
            continue
        if forward_of[op] != op and "convolution" in graph.targets[forward_of[op]]:
            overlap[op] = overlap[forward_of[op]]
            continue
        operands = [*graph.value_bytes[graph.reads_of(op)], *graph.weight_bytes[graph.uses_of(op)]]
        result_bytes = graph.value_bytes[graph.value_producer == op]
        if len(operands) < 2 or not len(result_bytes):
            continue
        first, second = sorted(map(float, operands))[-2:]
        itemsize = _ITEMSIZE.get(graph.dtypes[op], 4)
        product = 4.0 * first * second * float(result_bytes.max())
        overlap[op] = float(graph.flops[op]) ** 2 * itemsize**3 > _OVERLAP * product
    return overlap
