"""Tensors that are copied between a device and the host while it computes: when, and at what cost.

A *unit* is what is copied at once: what of a block's weights and cache lies in a tier. With overlap
a device has room for two: while one is computed with, the next one is copied, as FlexGen and
DeepSpeed's ZeRO-Inference do. Without, a device copies a unit when it comes to it, and waits, as
accelerate's hooks do. What an operator has made for the other side, such as a new token's cache, a
gradient or an updated weight, is *pushed* as soon as it is there.
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
"""Units that a device has room for, with overlap."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a unit's tensors lie, as far as that decides how fast they are copied."""

    share: float = 1.0
    """Share of a link's rate that copies from there reach."""
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of what one device needs of a unit."""

    unit: int
    device: int
    size_bytes: int
    first_op: int
    """The operator of the device that begins to need it."""
    last_op: int
    """The last that does."""
    source: Source = Source()
    filled_bytes: int = 0
    """Room beside that, which the device fills itself: what is written to a cache."""
    stays: bool = False
    """Whether that room is taken from the start to the last operator, and nothing is copied."""
    pool: int = 0
    """Copies of one pool share room on a device: for two units, with overlap."""


@dataclass(frozen=True, slots=True)
class Push:
    """The copy of what operators have made, as soon as they have."""

    device: int
    """Whose link it goes over."""
    size_bytes: int
    after_op: int
    """The operator that is the last to make some of it."""
    waiting_ops: tuple[int, ...] = ()
    """Operators that need it, or the room that it lay in."""
    to_host: bool = True
    """Else from the host to the device."""
    source: Source = Source()
    """Where it lies on the host's side."""


class _Run(NamedTuple):
    """When copies and pushes run."""

    copies: list[tuple[float, float]]
    pushes: list[tuple[float, float]]

    @property
    def pushed_s(self) -> float:
        """When the last push has ended."""
        return max((end for _, end in self.pushes), default=0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Streams:
    """The links that copies go over, and how copies take turns."""

    link_bytes_per_s: FloatArray
    """From the host to each device, shape (D,)."""
    link_latency_s: FloatArray
    """Fixed cost of a copy, shape (D,)."""
    overlap: bool = True
    host_bytes_per_s: float = np.inf
    """What all devices together read from the host at most, and as much again they write to it."""
    disk_bytes_per_s: float = np.inf
    """At which a disk is read, and written."""

    def rate(self, copy: Copy | Push) -> float:
        """Return the bytes per second of a copy by itself.

        Without overlap what comes from a disk is first read, and then copied.
        """
        link = float(self.link_bytes_per_s[copy.device]) * copy.source.share
        link = min(link, self.host_bytes_per_s)
        if not copy.source.from_disk:
            return link
        if self.overlap:
            return min(link, self.disk_bytes_per_s)
        return 1.0 / (1.0 / link + 1.0 / self.disk_bytes_per_s)

    def copy_s(self, copy: Copy | Push) -> float:
        """Return the time of a copy by itself."""
        return float(self.link_latency_s[copy.device]) + copy.size_bytes / self.rate(copy)


class Uses(NamedTuple):
    """Which operators use storages, weights or caches, and what of those is copied."""

    users: IntArray
    """The operator of each use. Shape (U,)."""
    storages: IntArray
    """The storage that it uses. Shape (U,)."""
    copied_bytes: IntArray
    """Of each storage. Shape (S,)."""
    filled_bytes: IntArray | None = None
    """As `Copy.filled_bytes` of each storage; None for none. Shape (S,)."""


def copies_of(
    uses: Uses, device_of: IntArray, unit_of: IntArray, sources: Sequence[Source]
) -> list[Copy]:
    """Return the copies that a placement needs, in the order in which they are needed.

    `unit_of` is the unit of each storage that is streamed, -1 of others, shape (S,); `sources` says
    where each unit lies. A storage that two devices use is copied to both.
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
    """Return the room that each device needs for what is copied to it, shape (D,).

    With overlap that of the two largest units in a row; else that of the largest one. What stays
    is there at once, either way.
    """
    total = np.zeros(devices, dtype=np.int64)
    for pool in sorted({copy.pool for copy in copies}):
        room, before, staying = (np.zeros(devices, dtype=np.int64) for _ in range(3))
        for copy in (copy for copy in copies if copy.pool == pool):
            held = copy.size_bytes + copy.filled_bytes
            room[copy.device] = max(room[copy.device], held + before[copy.device] * overlap)
            before[copy.device] = held
            staying[copy.device] += held * copy.stays
        total += np.maximum(room, staying)
    return total


def run_copies(
    costs: CostTables,
    device_of: IntArray,
    copies: Sequence[Copy],
    streams: Streams,
    pushes: Sequence[Push] = (),
) -> tuple[CostTables, _Run]:
    """Return `costs` in which operators wait for copies and pushes, and when each of them runs.

    Copies over one link, from one disk or through one root take turns in the order in which they
    are needed. One begins when there is room for it: when the device is through with the one
    before the last. Pushes take turns in the same way, in the order of `pushes`; links, roots and
    disks carry both directions at once, and to a device pushes come after copies.
    """
    if not streams.overlap:
        return _run_waiting(costs, device_of, copies, streams, pushes)
    log = schedule_log(costs)
    timed, run = costs, _Run([(0.0, 0.0)] * len(copies), [(0.0, 0.0)] * len(pushes))
    # What is waited for depends on what runs before it alone, so each turn settles one more copy.
    for _ in range(len(copies) + len(pushes) + 1):
        schedule(timed, device_of, log)
        again = _in_turn(copies, pushes, streams, log.finish_s)
        issue_s = costs.issue_s.copy()
        for copy, (_, end) in zip(copies, again.copies, strict=True):
            issue_s[copy.first_op] = max(issue_s[copy.first_op], end)
        for push, (_, end) in zip(pushes, again.pushes, strict=True):
            for op in push.waiting_ops:
                issue_s[op] = max(issue_s[op], end)
        if again == run:
            break
        timed, run = costs._replace(issue_s=issue_s), again
    return timed, run


def _run_waiting(
    costs: CostTables,
    device_of: IntArray,
    copies: Sequence[Copy],
    streams: Streams,
    pushes: Sequence[Push],
) -> tuple[CostTables, _Run]:
    """Return what `run_copies` does where devices do nothing else meanwhile."""
    log, taken = schedule_log(costs), costs.op_time_s.copy()
    for copy in copies:
        taken[copy.first_op, copy.device] += streams.copy_s(copy)
    for push in pushes:
        taken[push.after_op, device_of[push.after_op]] += streams.copy_s(push)
    timed = costs._replace(op_time_s=taken)
    schedule(timed, device_of, log)
    starts = [float(log.start_s[copy.first_op]) for copy in copies]
    ends = [float(log.finish_s[push.after_op]) for push in pushes]
    return timed, _Run(
        [(s, s + streams.copy_s(c)) for s, c in zip(starts, copies, strict=True)],
        [(e - streams.copy_s(p), e) for e, p in zip(ends, pushes, strict=True)],
    )


class _Free:
    """When links, roots and disks are free, each in one direction."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.link_s: dict[tuple[int, bool], float] = defaultdict(float)
        self.root_s: dict[bool, float] = defaultdict(float)
        self.disk_s: dict[bool, float] = defaultdict(float)

    def run(self, copy: Copy | Push, ready_s: float, *, to_host: bool) -> tuple[float, float]:
        """Return when a copy runs that may begin at `ready_s`."""
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
    """Return when each copy and push runs, given when operators finish."""
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
    """Return what a placement costs whose devices wait for copies; it ends with the last push.

    What is copied to devices counts nothing in `problem`: its room is added to the peak of each
    device. `bound_s` is a latency that no plan can beat, `least_load_s` a largest load.
    """
    timed, run = run_copies(problem.costs, assignment.device_of, copies, streams, pushes)
    found = evaluate(replace(problem, costs=timed), assignment)
    room = buffer_bytes(copies, problem.topology.n_devices, overlap=streams.overlap).tolist()
    busiest_s = max(
        [use.load_s for use in found.devices]
        + [float(problem.costs.issue_s[-1])]
        + _link_loads(found)
        + _copy_loads(copies, pushes, run, streams)
    )
    return replace(
        found,
        latency_s=max(found.latency_s, run.pushed_s),
        throughput_per_s=1.0 / busiest_s if busiest_s > 0 else float("inf"),
        lower_bound_s=bound_s,
        load_bound_s=least_load_s,
        devices=tuple(
            replace(
                use,
                peak_bytes=use.peak_bytes + room[use.logical_id],
                static_bytes=use.static_bytes + room[use.logical_id],
            )
            for use in found.devices
        ),
        memory=tuple(
            replace(profile, held_bytes=profile.held_bytes + room[device])
            for device, profile in enumerate(found.memory)
        ),
    )


def _link_loads(evaluation: Evaluation) -> list[float]:
    """Return how long each link between devices carries what one input sends over it."""
    loads: dict[tuple[int, int], float] = defaultdict(float)
    moves = evaluation.transfers
    taken = (moves.finish_s - moves.start_s).tolist()
    for source, target, seconds in zip(
        moves.source.tolist(), moves.target.tolist(), taken, strict=True
    ):
        loads[source, target] += seconds
    return list(loads.values())


def _copy_loads(
    copies: Sequence[Copy], pushes: Sequence[Push], run: _Run, streams: Streams
) -> list[float]:
    """Return how long links, the root and the disk are busy with the copies of one input."""
    links: dict[tuple[int, bool], float] = defaultdict(float)
    moved = [(copy, False) for copy in copies] + [(push, push.to_host) for push in pushes]
    for (copy, to_host), (begin, end) in zip(moved, run.copies + run.pushes, strict=True):
        links[copy.device, to_host] += end - begin
    loads = list(links.values())
    for direction in (False, True):
        sizes = [copy.size_bytes for copy, to_host in moved if to_host == direction]
        stored = [c.size_bytes for c, up in moved if up == direction and c.source.from_disk]
        loads += [sum(sizes) / streams.host_bytes_per_s, sum(stored) / streams.disk_bytes_per_s]
    return loads
