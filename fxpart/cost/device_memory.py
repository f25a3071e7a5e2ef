"""`DeviceMemory`: what a device really has to have for a plan, part by part, and whether it has it.

`Evaluation` counts tensors. Beside those lie what kernels and libraries take, what torch's
allocator keeps, the buffers of NCCL and the context: what ``nvidia-smi`` shows is the sum.
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

__all__ = ["PARTS", "DeviceMemory", "Verdict", "convolution_bytes", "device_memory_of"]

BoolArray = npt.NDArray[np.bool_]

PARTS = {
    "tensors": "what the plan holds at its peak, as the allocator rounds it",
    "kept gradients": "of a weight of each shape, that Transformer Engine returns and keeps",
    "kernel workspaces": "of the operator that runs then: cuDNN's convolutions",
    "allocator": "segments that torch's allocator keeps beyond what it hands out",
    "library workspaces": "of cuBLAS, for each handle and stream",
    "communication": "buffers of NCCL, for each device that tensors are exchanged with",
    "context": "the driver's context and loaded kernels",
}
"""What each part is, in order."""

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OVERLAP = 1.1
"""Products of a number, from which on windows overlap: 1 where each is read once."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device needs for a plan."""

    device: int
    """Logical id."""
    parts: Mapping[str, Interval]
    """By `PARTS`, in their order; those that there are."""
    total_bytes: int
    """What the device has."""

    @property
    def needed(self) -> Interval:
        """Return the sum of all parts."""
        return sum(self.parts.values(), start=Interval(0, 0, 0))

    @property
    def verdict(self) -> Verdict:
        """Return ``fits`` if the most fits, ``tight`` if only what is expected does."""
        needed = self.needed
        if needed.expected > self.total_bytes:
            return "does not fit"
        return "fits" if needed.high <= self.total_bytes else "tight"

    @property
    def decided_by(self) -> str:
        """Return the part that decides a verdict other than ``fits``; else ``""``.

        Where it does not fit, that is the first with which the device is full; where it is tight,
        the one that may exceed what is expected by most.
        """
        if self.verdict == "fits":
            return ""
        if self.verdict == "tight":
            return max(self.parts, key=lambda p: self.parts[p].high - self.parts[p].expected)
        held = 0
        for part, size in self.parts.items():
            held += size.expected
            if held > self.total_bytes:
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
    """Return what each device that computes needs, in the order of logical ids.

    Args:
        problem: its graph has sizes as the allocator rounds them.
        assignment: of its operators.
        reserves: what is known of the parts on each device of the topology.
        tensor_bytes: what the plan holds on each device at its peak. Where that is more than one
            input takes, as of microbatches in flight, the allocator keeps as large a share as
            with one.
        peers: with how many devices each exchanges tensors, where processes do so.
        kept_bytes: what an engine keeps on each device beside the plan's tensors, if it does.

    """
    needs = []
    takes_workspace = any(r.caching_allocator or r.convolution_workspace for r in reserves)
    convolved = convolution_bytes(problem.graph) if takes_workspace else np.zeros(1, np.int64)
    for device, device_of, storages, op in storages_at_peak(problem, assignment):
        reserve = reserves[device]
        parts = {
            "library workspaces": reserve.interval("workspace"),
            "communication": reserve.interval("nccl_peer").times(peers.get(device, 0)),
            "context": reserve.interval("context"),
        }
        total_bytes = problem.topology.devices[device].total_bytes
        room_bytes = total_bytes - sum(size.expected for size in parts.values())
        held = _Held(storages, int(storages.size_bytes[storages.at(op)].sum()))
        convolved_here = np.where(device_of == device, convolved, 0)
        of_torch = _parts_of_torch(
            problem.graph, held, convolved_here, reserve, (tensor_bytes[device], room_bytes)
        )
        kept = (kept_bytes or {}).get(device, 0)
        of_torch["kept gradients"] = Interval(kept, kept, kept)
        every = of_torch | parts
        parts = {part: every[part] for part in PARTS if part in every and every[part].high}
        needs.append(DeviceMemory(device, parts, total_bytes))
    return tuple(needs)


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """What one input holds on a device."""

    storages: Storages
    peak_bytes: int


def _parts_of_torch(
    graph: OpGraph,
    held: _Held,
    convolved: IntArray,
    reserve: Reserve,
    sizes_bytes: tuple[int, int],
) -> dict[str, Interval]:
    """Return what torch's own allocator takes of a device.

    Args:
        graph: its sizes are those that the allocator rounds to.
        held: by one input.
        convolved: `convolution_bytes` of the operators on the device, 0 for the others.
        reserve: what is known of the parts.
        sizes_bytes: the tensors of the plan at their peak, and the room that there is for them.

    """
    tensors, room = sizes_bytes
    parts = {"tensors": Interval(tensors, tensors, tensors)}
    if not (reserve.caching_allocator or reserve.convolution_workspace):
        return parts
    low, expected, high = (
        (share * convolved).astype(np.int64) for share in reserve.convolution_shares
    )
    limit_bytes = room - max(0, tensors - held.peak_bytes)
    run = reservation(graph, held.storages, expected, limit_bytes)
    kernels = max(0, run.allocated_bytes - held.peak_bytes)
    most = max(kernels, int(high.max()))
    parts["kernel workspaces"] = Interval(min(kernels, int(low.max())), kernels, most)
    if reserve.caching_allocator:
        kept = run.reserved_bytes - run.allocated_bytes
        # Of several inputs as large a share, as far as there is room: the rest is given back.
        of_all = round(kept * max(1.0, tensors / max(held.peak_bytes, 1)))
        kept = max(kept, min(of_all, room - tensors - kernels))
        spread = round(reserve.allocator_error * tensors)
        parts["allocator"] = Interval(max(0, kept - spread), kept, kept + spread)
    return parts


def convolution_bytes(graph: OpGraph) -> IntArray:
    """Return of each operator the bytes that its workspace is a multiple of; shape (n,).

    They are what a convolution whose windows overlap, forward or backward, reads and writes: cuDNN
    copies that into the layout of matrix units, or into Winograd's tiles. One that reads each
    number once is a matrix product, and one of single channels runs in place. All other operators
    have their temporaries in the graph, or none of note.
    """
    return np.where(_windows_overlap(graph), graph.moved_bytes, 0)


def _windows_overlap(graph: OpGraph) -> BoolArray:
    """Return of each operator whether it is a convolution with windows that overlap; shape (n,).

    Each number of the input is read for k^2 / (groups x stride^2) as many products as an output
    channel has places, which follows from sizes and FLOPs: a convolution of a dtype of b bytes with
    f FLOPs, input x, weight w and result y (in bytes) has f^2 b^3 / (4 x w y).
    """
    overlap = np.zeros(graph.n_ops, dtype=np.bool_)
    of = graph.forward_of
    for op in range(graph.n_ops):
        if "convolution" not in graph.targets[op]:
            continue
        if of[op] != op and "convolution" in graph.targets[of[op]]:
            overlap[op] = overlap[of[op]]
            continue
        operands = [*graph.value_bytes[graph.reads_of(op)], *graph.weight_bytes[graph.uses_of(op)]]
        made = graph.value_bytes[graph.value_producer == op]
        if len(operands) < 2 or not len(made):
            continue
        first, second = sorted(map(float, operands))[-2:]
        itemsize = _ITEMSIZE.get(graph.dtypes[op], 4)
        product = 4.0 * first * second * float(made.max())
        overlap[op] = float(graph.flops[op]) ** 2 * itemsize**3 > _OVERLAP * product
    return overlap
