"""Timing and cost of tensors copied between devices and the host during a run.

A *unit* is copied as a whole: the offloaded weights and cache of a block. With overlap a device has
two buffers, and the next unit is prefetched while the current one is used, as in FlexGen and
DeepSpeed's ZeRO-Inference. Without overlap a device copies each unit on demand and stalls, as with
accelerate's hooks. Results for the other side, such as a new token's cache, a gradient or an
updated weight, are *pushed* as soon as they are available.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables

__all__ = [
    "Copy",
    "Push",
    "Source",
    "Streams",
    "Uses",
    "buffer_bytes",
    "copies_of",
    "run_copies",
    "with_streams",
]

_BUFFERS = 2
"""Number of unit buffers on a device with overlap."""


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a unit's tensors, as far as it affects the copy rate."""

    share: float = 1.0
    """Share of the link's rate that copies from there reach."""
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of a unit, or the part of it that one device needs."""

    unit: int
    device: int
    size_bytes: int
    first_op: int
    """The first operator on the device that needs it."""
    last_op: int
    """The last operator that needs it."""
    source: Source = Source()
    filled_bytes: int = 0
    """Additional buffer memory that the device fills itself, such as new cache entries."""
    stays: bool = False
    """Whether the memory is in use from the start to the last operator, without any copy."""
    pool: int = 0
    """Copies of one pool share the buffers of a device: two with overlap."""


@dataclass(frozen=True, slots=True)
class Push:
    """The copy of results as soon as they are available."""

    device: int
    """The device whose link it uses."""
    size_bytes: int
    after_op: int
    """The last operator that produces any of it."""
    waiting_ops: tuple[int, ...] = ()
    """Operators that need it, or the memory it occupied."""
    to_host: bool = True
    """Otherwise from the host to the device."""
    source: Source = Source()
    """Its location on the host's side."""


class _Run(NamedTuple):
    """Start and end of each copy and push in s."""

    copies: list[tuple[float, float]]
    pushes: list[tuple[float, float]]

    @property
    def pushed_s(self) -> float:
        """End of the last push."""
        return max((end for _, end in self.pushes), default=0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Streams:
    """The links used by copies, and how they are shared."""

    link_bytes_per_s: FloatArray
    """From the host to each device, shape (D,)."""
    link_latency_s: FloatArray
    """Fixed cost of a copy, shape (D,)."""
    overlap: bool = True
    host_bytes_per_s: float = np.inf
    """Limit on the total rate of all devices from the host, and equally to the host."""
    disk_bytes_per_s: float = np.inf
    """Read and write rate of the disk."""

    def rate(self, copy: Copy | Push) -> float:
        """Return the rate of an uncontended copy in bytes per second.

        Without overlap, reading from disk and copying happen one after the other.
        """
        link = float(self.link_bytes_per_s[copy.device]) * copy.source.share
        link = min(link, self.host_bytes_per_s)
        if not copy.source.from_disk:
            return link
        if self.overlap:
            return min(link, self.disk_bytes_per_s)
        return 1.0 / (1.0 / link + 1.0 / self.disk_bytes_per_s)

    def copy_s(self, copy: Copy | Push) -> float:
        """Return the time of an uncontended copy."""
        return float(self.link_latency_s[copy.device]) + copy.size_bytes / self.rate(copy)


class Uses(NamedTuple):
    """Uses of storages (weights or caches) by operators, and the bytes to copy."""

    users: IntArray
    """The operator of each use. Shape (U,)."""
    storages: IntArray
    """The storage of each use. Shape (U,)."""
    copied_bytes: IntArray
    """Bytes to copy of each storage. Shape (S,)."""
    filled_bytes: IntArray | None = None
    """`Copy.filled_bytes` of each storage; None if all are 0. Shape (S,)."""


def copies_of(
    uses: Uses, device_of: IntArray, unit_of: IntArray, sources: Sequence[Source]
) -> list[Copy]:
    """Return the copies of a placement, in the order in which they are needed.

    `unit_of` is the unit of each streamed storage and -1 for others, shape (S,); `sources` is the
    location of each unit. A storage used on two devices is copied to both.
    """
    streamed = unit_of[uses.storages] >= 0
    users, storages = uses.users[streamed], uses.storages[streamed]
    device, unit = device_of[users], unit_of[storages]
    size: dict[tuple[int, int], int] = defaultdict(int)
    filled: dict[tuple[int, int], int] = defaultdict(int)
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    for key, op, storage in zip(
        zip(unit.tolist(), device.tolist(), strict=True),
        users.tolist(),
        storages.tolist(),
        strict=True,
    ):
        first[key] = min(op, first.get(key, op))
        last[key] = max(op, last.get(key, op))
        if (storage, key[1]) not in seen:
            seen.add((storage, key[1]))
            size[key] += int(uses.copied_bytes[storage])
            if uses.filled_bytes is not None:
                filled[key] += int(uses.filled_bytes[storage])
    return [
        Copy(*key, size[key], begin, last[key], sources[key[0]], filled[key])
        for key, begin in sorted(first.items(), key=lambda item: item[1])
    ]


def buffer_bytes(copies: Sequence[Copy], devices: int, *, overlap: bool) -> IntArray:
    """Return the buffer memory of each device, shape (D,).

    With overlap this is the largest pair of consecutive units, otherwise the largest unit. Copies
    that stay all count at once.
    """
    total = np.zeros(devices, dtype=np.int64)
    for pool in sorted({copy.pool for copy in copies}):
        peak_bytes, previous_bytes, staying_bytes = (
            np.zeros(devices, dtype=np.int64) for _ in range(3)
        )
        for copy in (copy for copy in copies if copy.pool == pool):
            unit_bytes = copy.size_bytes + copy.filled_bytes
            peak_bytes[copy.device] = max(
                peak_bytes[copy.device], unit_bytes + previous_bytes[copy.device] * overlap
            )
            previous_bytes[copy.device] = unit_bytes
            staying_bytes[copy.device] += unit_bytes * copy.stays
        total += np.maximum(peak_bytes, staying_bytes)
    return total


def run_copies(
    costs: CostTables,
    device_of: IntArray,
    copies: Sequence[Copy],
    streams: Streams,
    pushes: Sequence[Push] = (),
) -> tuple[CostTables, _Run]:
    """Return `costs` with operators delayed by copies and pushes, and the times of those.

    Copies that share a link, disk or root are served in the order in which they are needed. A copy
    begins once a buffer is free, that is when the device is done with the unit before the previous
    one. Pushes are served likewise, in the order of `pushes`. Links, roots and disks are full
    duplex, and pushes to a device come after copies.
    """
    if not streams.overlap:
        return _run_waiting(costs, device_of, copies, streams, pushes)
    log = schedule_log(costs)
    timed, run = costs, _Run([(0.0, 0.0)] * len(copies), [(0.0, 0.0)] * len(pushes))
    # Each wait depends only on earlier events, so every iteration settles at least one more copy.
    for _ in range(len(copies) + len(pushes) + 1):
        schedule(timed, device_of, log)
        next_run = _in_turn(copies, pushes, streams, log.finish_s)
        issue_s = costs.issue_s.copy()
        for copy, (_, end) in zip(copies, next_run.copies, strict=True):
            issue_s[copy.first_op] = max(issue_s[copy.first_op], end)
        for push, (_, end) in zip(pushes, next_run.pushes, strict=True):
            for op in push.waiting_ops:
                issue_s[op] = max(issue_s[op], end)
        if next_run == run:
            break
        timed, run = costs._replace(issue_s=issue_s), next_run
    return timed, run


def _run_waiting(
    costs: CostTables,
    device_of: IntArray,
    copies: Sequence[Copy],
    streams: Streams,
    pushes: Sequence[Push],
) -> tuple[CostTables, _Run]:
    """Return the result of `run_copies` if devices stall during copies."""
    log, op_time_s = schedule_log(costs), costs.op_time_s.copy()
    for copy in copies:
        op_time_s[copy.first_op, copy.device] += streams.copy_s(copy)
    for push in pushes:
        op_time_s[push.after_op, device_of[push.after_op]] += streams.copy_s(push)
    timed = costs._replace(op_time_s=op_time_s)
    schedule(timed, device_of, log)
    starts = [float(log.start_s[copy.first_op]) for copy in copies]
    ends = [float(log.finish_s[push.after_op]) for push in pushes]
    return timed, _Run(
        [(s, s + streams.copy_s(c)) for s, c in zip(starts, copies, strict=True)],
        [(e - streams.copy_s(p), e) for e, p in zip(ends, pushes, strict=True)],
    )


class _Free:
    """Times at which links, roots and disks become free, per direction."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.link_s: dict[tuple[int, bool], float] = defaultdict(float)
        self.root_s: dict[bool, float] = defaultdict(float)
        self.disk_s: dict[bool, float] = defaultdict(float)

    def run(self, copy: Copy | Push, ready_s: float, *, to_host: bool) -> tuple[float, float]:
        """Schedule a copy that may begin at `ready_s`; return its start and end."""
        streams, link = self.streams, (copy.device, to_host)
        begin = max(ready_s, self.link_s[link], self.root_s[to_host])
        if copy.source.from_disk:
            begin = max(begin, self.disk_s[to_host])
            self.disk_s[to_host] = begin + copy.size_bytes / streams.disk_bytes_per_s
        self.root_s[to_host] = begin + copy.size_bytes / streams.host_bytes_per_s
        self.link_s[link] = end = begin + streams.copy_s(copy)
        return begin, end


def _in_turn(
    copies: Sequence[Copy], pushes: Sequence[Push], streams: Streams, finish_s: FloatArray
) -> _Run:
    """Return the times of copies and pushes, given the finish times of operators."""
    free = _Free(streams)
    on_device: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    copied, pushed = [], []
    for copy in copies:
        earlier = on_device[copy.device, copy.pool]
        full = len(earlier) >= _BUFFERS
        ready_s = float(finish_s[earlier[-_BUFFERS].last_op]) if full else 0.0
        copied.append(free.run(copy, ready_s, to_host=False))
        earlier.append(copy)
    for push in pushes:
        ready_s = float(finish_s[push.after_op])
        pushed.append(free.run(push, ready_s, to_host=push.to_host))
    return _Run(copied, pushed)


def with_streams(
    problem: Problem,
    assignment: Assignment,
    copies: Sequence[Copy],
    streams: Streams,
    *,
    bound_s: float,
    least_load_s: float,
    pushes: Sequence[Push] = (),
) -> Evaluation:
    """Evaluate a placement with streamed tensors; the latency includes the last push.

    Streamed tensors must have no bytes in `problem`: their buffers are added to the peak of each
    device. `bound_s` is a lower bound of the latency, `least_load_s` one of the largest load.
    """
    timed, run = run_copies(problem.costs, assignment.device_of, copies, streams, pushes)
    evaluation = evaluate(replace(problem, costs=timed), assignment, search_bounds=False)
    buffers = buffer_bytes(copies, problem.topology.n_devices, overlap=streams.overlap).tolist()
    busiest_s = max(
        [use.load_s for use in evaluation.devices]
        + [float(problem.costs.issue_s[-1])]
        + _link_loads(evaluation)
        + _copy_loads(copies, pushes, run, streams)
    )
    return replace(
        evaluation,
        latency_s=max(evaluation.latency_s, run.pushed_s),
        throughput_per_s=1.0 / busiest_s if busiest_s > 0 else float("inf"),
        lower_bound_s=bound_s,
        load_bound_s=least_load_s,
        devices=tuple(
            replace(
                use,
                peak_bytes=use.peak_bytes + buffers[use.logical_id],
                static_bytes=use.static_bytes + buffers[use.logical_id],
            )
            for use in evaluation.devices
        ),
        memory=tuple(
            replace(profile, held_bytes=profile.held_bytes + buffers[device])
            for device, profile in enumerate(evaluation.memory)
        ),
    )


def _link_loads(evaluation: Evaluation) -> list[float]:
    """Return the busy time of each link between devices for one input."""
    loads: dict[tuple[int, int], float] = defaultdict(float)
    moves = evaluation.transfers
    transfer_s = (moves.finish_s - moves.start_s).tolist()
    for source, target, seconds in zip(
        moves.source.tolist(), moves.target.tolist(), transfer_s, strict=True
    ):
        loads[source, target] += seconds
    return list(loads.values())


def _copy_loads(
    copies: Sequence[Copy], pushes: Sequence[Push], run: _Run, streams: Streams
) -> list[float]:
    """Return the busy times of host links, root and disk for the copies of one input."""
    links: dict[tuple[int, bool], float] = defaultdict(float)
    moved = [(copy, False) for copy in copies] + [(push, push.to_host) for push in pushes]
    for (copy, to_host), (begin, end) in zip(moved, run.copies + run.pushes, strict=True):
        links[copy.device, to_host] += end - begin
    loads = list(links.values())
    for direction in (False, True):
        sizes = [copy.size_bytes for copy, to_host in moved if to_host == direction]
        disk_sizes = [c.size_bytes for c, up in moved if up == direction and c.source.from_disk]
        loads += [sum(sizes) / streams.host_bytes_per_s, sum(disk_sizes) / streams.disk_bytes_per_s]
    return loads
