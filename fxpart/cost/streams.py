"""Weights that are copied to a device while it computes: when copies run, and what they cost.

A *unit* is what is copied at once: the weights of a block that lie in a tier. With overlap a device
has room for two: while one is computed with, the next one is copied, as FlexGen and DeepSpeed's
ZeRO-Inference do. Without, a device copies a unit when it comes to it, and waits, as accelerate's
hooks do.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables

__all__ = ["Copy", "Source", "Streams", "buffer_bytes", "copies_of", "run_copies", "with_streams"]

_BUFFERS = 2
"""Units that a device has room for, with overlap."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a unit's weights lie, as far as that decides how fast they are copied."""

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


@dataclass(frozen=True, eq=False, slots=True)
class Streams:
    """The links that copies go over, and how copies take turns."""

    link_bytes_per_s: FloatArray
    """From the host to each device, shape (D,)."""
    link_latency_s: FloatArray
    """Fixed cost of a copy, shape (D,)."""
    overlap: bool = True
    host_bytes_per_s: float = np.inf
    """What all devices together read from the host at most."""
    disk_bytes_per_s: float = np.inf

    def rate(self, copy: Copy) -> float:
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

    def copy_s(self, copy: Copy) -> float:
        """Return the time of a copy by itself."""
        return float(self.link_latency_s[copy.device]) + copy.size_bytes / self.rate(copy)


def copies_of(
    graph: OpGraph,
    weight_bytes: IntArray,
    device_of: IntArray,
    unit_of: IntArray,
    sources: Sequence[Source],
) -> list[Copy]:
    """Return the copies that a placement needs, in the order in which they are needed.

    `unit_of` is the unit of each weight that is streamed, -1 of others, shape (W,); `weight_bytes`
    has the sizes, shape (W,); `sources` where each unit lies. A weight that two devices use is
    copied to both.
    """
    size: dict[tuple[int, int], int] = defaultdict(int)
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    for op, weight in zip(graph.users.tolist(), graph.uses.tolist(), strict=True):
        unit = int(unit_of[weight])
        if unit < 0:
            continue
        device = int(device_of[op])
        key = (unit, device)
        first.setdefault(key, op)
        last[key] = op
        if (weight, device) not in seen:
            seen.add((weight, device))
            size[key] += int(weight_bytes[weight])
    return [
        Copy(unit, device, size[unit, device], begin, last[unit, device], sources[unit])
        for (unit, device), begin in sorted(first.items(), key=lambda item: item[1])
    ]


def buffer_bytes(copies: Sequence[Copy], devices: int, *, overlap: bool) -> IntArray:
    """Return the room that each device needs for what is copied to it, shape (D,).

    With overlap that of the two largest units in a row; else that of the largest one.
    """
    room = np.zeros(devices, dtype=np.int64)
    before = np.zeros(devices, dtype=np.int64)
    for copy in copies:
        both = copy.size_bytes + (before[copy.device] if overlap else 0)
        room[copy.device] = max(room[copy.device], both)
        before[copy.device] = copy.size_bytes
    return room


def run_copies(
    costs: CostTables, device_of: IntArray, copies: Sequence[Copy], streams: Streams
) -> tuple[CostTables, list[tuple[float, float]]]:
    """Return `costs` in which operators wait for their weights, and when each copy runs.

    Copies over one link, from one disk or through one root take turns in the order in which they
    are needed. One begins when there is room for it: when the device is through with the one
    before the last.
    """
    if not streams.overlap:
        taken = costs.op_time_s.copy()
        for copy in copies:
            taken[copy.first_op, copy.device] += streams.copy_s(copy)
        timed = costs._replace(op_time_s=taken)
        log = schedule_log(timed)
        schedule(timed, device_of, log)
        starts = [float(log.start_s[copy.first_op]) for copy in copies]
        return timed, [(s, s + streams.copy_s(c)) for s, c in zip(starts, copies, strict=True)]
    log = schedule_log(costs)
    timed, runs = costs, [(0.0, 0.0)] * len(copies)
    # What is waited for depends on what runs before it alone, so each turn settles one more copy.
    for _ in range(len(copies) + 1):
        schedule(timed, device_of, log)
        again = _in_turn(copies, streams, log.finish_s)
        issue_s = costs.issue_s.copy()
        for copy, (_, end) in zip(copies, again, strict=True):
            issue_s[copy.first_op] = max(issue_s[copy.first_op], end)
        if again == runs:
            break
        timed, runs = costs._replace(issue_s=issue_s), again
    return timed, runs


def _in_turn(
    copies: Sequence[Copy], streams: Streams, finish_s: FloatArray
) -> list[tuple[float, float]]:
    """Return when each copy runs, given when operators finish."""
    link_free: dict[int, float] = defaultdict(float)
    on_device: dict[int, list[Copy]] = defaultdict(list)
    root_free, disk_free = 0.0, 0.0
    runs = []
    for copy in copies:
        earlier = on_device[copy.device]
        begin = max(link_free[copy.device], root_free)
        if copy.source.from_disk:
            begin = max(begin, disk_free)
        if len(earlier) >= _BUFFERS:
            begin = max(begin, float(finish_s[earlier[-_BUFFERS].last_op]))
        end = begin + streams.copy_s(copy)
        link_free[copy.device] = end
        root_free = begin + copy.size_bytes / streams.host_bytes_per_s
        if copy.source.from_disk:
            disk_free = begin + copy.size_bytes / streams.disk_bytes_per_s
        earlier.append(copy)
        runs.append((begin, end))
    return runs


def with_streams(
    problem: Problem,
    assignment: Assignment,
    copies: Sequence[Copy],
    streams: Streams,
    *,
    bound_s: float,
    least_load_s: float,
) -> Evaluation:
    """Return what a placement costs whose devices wait for copies.

    The weights that are copied count nothing in `problem`: their room is added to the peak of each
    device. `bound_s` is a latency that no plan can beat, `least_load_s` a largest load.
    """
    timed, runs = run_copies(problem.costs, assignment.device_of, copies, streams)
    found = evaluate(replace(problem, costs=timed), assignment)
    room = buffer_bytes(copies, problem.topology.n_devices, overlap=streams.overlap).tolist()
    busiest_s = max(
        [use.load_s for use in found.devices]
        + [float(problem.costs.issue_s[-1])]
        + _link_loads(found)
        + _copy_loads(copies, runs, streams)
    )
    return replace(
        found,
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
    copies: Sequence[Copy], runs: Sequence[tuple[float, float]], streams: Streams
) -> list[float]:
    """Return how long links, the root and the disk are busy with the copies of one input."""
    links: dict[int, float] = defaultdict(float)
    for copy, (begin, end) in zip(copies, runs, strict=True):
        links[copy.device] += end - begin
    root_s = sum(copy.size_bytes for copy in copies) / streams.host_bytes_per_s
    from_disk = sum(copy.size_bytes for copy in copies if copy.source.from_disk)
    return [*links.values(), root_s, from_disk / streams.disk_bytes_per_s]
