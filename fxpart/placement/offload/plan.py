"""Which modules of a model that the devices do not hold run with their weights in a tier, and how.

A module is *streamed*, its weights copied to a device for as long as it runs, or runs on the host.
A tier is no device to a mode: what is offloaded is chosen first, least time a byte first and no
more than must be (what still fits comes back), then the mode places all on the devices, and what
runs on the host goes there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.module_paths import owner
from fxpart.core.partitions import partition_by_device
from fxpart.core.tiers import OffloadOptions, Tiers
from fxpart.core.topology import DeviceSpec
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Copy, Source, Streams, copies_of, run_copies, with_streams
from fxpart.cost.tables import memory_tables
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.device_order import used_weight_bytes
from fxpart.placement.offload.bound import bound_s, least_load_s
from fxpart.placement.offload.machine import BoolArray, HostTimes, Machine
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED, Unit
from fxpart.placement.offload.ways import put_back_order, ways_of
from fxpart.placement.search.fill import place_all

__all__ = ["Offloaded", "finished", "offload"]

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
"""Of what is offloaded, the shares that are tried to be streamed."""
_STEPS = 9
"""Amounts that are tried to be offloaded where a mode needs more than filling devices does."""
_TRIES = 12
"""Halvings of what is offloaded until no less of it fits."""

Place = Callable[[Problem], Assignment]


@dataclass(frozen=True, eq=False, slots=True)
class Offloaded:
    """A plan for devices and tiers."""

    problem: Problem
    """Of the devices, and after them the host if any module runs there. Streamed weights count
    nothing in it."""
    assignment: Assignment
    evaluation: Evaluation
    units: tuple[Unit, ...]
    ways: IntArray
    """`RESIDENT`, `STREAMED` or `HOSTED` for each unit."""
    on_disk: BoolArray
    """Whether each unit's weights lie on the disk."""
    copies: tuple[Copy, ...]
    copied: tuple[str, ...]
    """The modules that the copies number as units."""
    waited_s: float
    """By how much copies make the latency longer."""
    hosted_bytes: int
    """What the host needs for the modules that run there."""
    devices: tuple[DeviceSpec, ...]
    """Those beside the tiers."""

    def stored_bytes(self, *, disk: bool = False) -> int:
        """Return the bytes of streamed weights in the host's memory, or on the disk."""
        chosen = (self.ways == STREAMED) & (self.on_disk == disk)
        return sum(u.weight_bytes for u, is_in in zip(self.units, chosen, strict=True) if is_in)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are copied to devices for one input."""
        return sum(copy.size_bytes for copy in self.copies)


def offload(
    problem: Problem,
    tiers: Tiers,
    options: OffloadOptions,
    *,
    link: tuple[float, float],
    host_times: HostTimes | None,
    place: Place,
    first: Problem | None = None,
) -> Offloaded:
    """Return a plan for a model that the devices of `problem` do not hold.

    Args:
        problem: the model on the devices alone.
        tiers: where weights may lie.
        options: how offloaded modules may run.
        link: bytes per second and latency in seconds of the link of a device to the host.
        host_times: times of operators on a topology that has the host as its last device; None
            where it does not compute.
        place: the mode.
        first: `problem` before earlier plans did not fit and took memory from it, for bounds.

    Raises:
        InfeasibleError: when the tiers are full, or the devices cannot hold what must be there.

    """
    machine = Machine(problem, tiers, options, link, host_times, first)
    shares = _SHARES if machine.computes and options.stream else (float(options.stream),)
    found: list[_Least] = []
    refused: InfeasibleError | None = None
    for share in shares:
        try:
            found.append(_least_offloaded(machine, share))
        except InfeasibleError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return _placed(machine, min(found, key=lambda least: least[:3]), place)


class _Least(NamedTuple):
    """The least that is offloaded at one share of streamed weights."""

    latency_s: float
    """Of a plain placement."""
    target_bytes: int
    """What was asked of `ways_of`."""
    share: float
    ways: IntArray
    """Those of `ways_of`, less what still fitted a device."""


def _placed(machine: Machine, least: _Least, place: Place) -> Offloaded:
    """Return the plan of the mode, which may need more to be offloaded than `least`.

    Such as `single`, or stages that are cut at modules.
    """
    total = int(machine.sizes.sum())
    spread = np.linspace(least.target_bytes, total, _STEPS).astype(np.int64)
    more = (ways_of(machine, target, least.share) for target in np.unique(spread).tolist())
    refused: InfeasibleError | None = None
    for ways in (least.ways, *more):
        try:
            return finished(machine, ways, place)
        except InfeasibleError as error:
            refused = error
    assert refused is not None
    raise refused


def _least_offloaded(machine: Machine, share: float) -> _Least:
    """Return the least to offload with a share of it streamed, by a plain placement.

    Raises:
        InfeasibleError: where even with all of it offloaded nothing fits.

    """
    total = int(machine.sizes.sum())
    room = int(machine.problem.topology.memory_bytes.sum())
    low, high = max(0, used_weight_bytes(machine.problem) - room), total
    fitting: tuple[IntArray, IntArray, int] | None = None
    target, smallest = high, int(machine.sizes.min(initial=total))
    for _ in range(_TRIES):
        ways = ways_of(machine, target, share)
        device_of = place_all(*_searched(machine, ways))
        if device_of is not None:
            fitting, high = (ways, device_of, target), target
        elif target == total:
            break
        else:
            low = target
        if high - low <= smallest // 2:
            break
        target = (low + high) // 2
    if fitting is None:
        raise _does_not_fit(machine)
    ways, device_of, target = fitting
    ways, device_of = _refilled(machine, ways, device_of)
    device_of = _on_host(machine, ways, device_of)
    on_disk = _stored(machine, ways, device_of)
    final, copies, streams, _ = _costed(machine, ways, on_disk, device_of)
    timed, _ = run_copies(final.costs, device_of, copies, streams)
    latency_s, _ = schedule(timed, device_of, schedule_log(timed))
    return _Least(float(latency_s), target, share, ways)


def _refilled(machine: Machine, ways: IntArray, device_of: IntArray) -> tuple[IntArray, IntArray]:
    """Return `ways` and a plain placement with all that still fits put back on devices.

    The last unit that is offloaded may be far larger than what was lacking.
    """
    too_large = {STREAMED: np.inf, HOSTED: np.inf}
    for unit in put_back_order(machine, ways):
        way = int(ways[unit])
        if machine.sizes[unit] >= too_large[way]:
            continue
        fewer = ways.copy()
        fewer[unit] = RESIDENT
        placed = place_all(*_searched(machine, fewer))
        if placed is None:
            too_large[way] = float(machine.sizes[unit])
        else:
            ways, device_of = fewer, placed
    return ways, device_of


def finished(machine: Machine, ways: IntArray, place: Place) -> Offloaded:
    """Return the plan with the mode's own placement."""
    problem, _ = _searched(machine, ways)
    device_of = _on_host(machine, ways, place(problem).device_of)
    on_disk = _stored(machine, ways, device_of)
    final, copies, streams, parts = _costed(machine, ways, on_disk, device_of)
    assignment = partition_by_device(final.graph, device_of)
    evaluation = with_streams(
        final,
        assignment,
        copies,
        streams,
        bound_s=bound_s(machine),
        least_load_s=least_load_s(machine),
    )
    without, _ = schedule(final.costs, device_of, schedule_log(final.costs))
    found = Offloaded(
        final,
        assignment,
        evaluation,
        machine.units,
        ways,
        on_disk,
        tuple(copies),
        tuple(parts),
        evaluation.latency_s - float(without),
        _host_bytes(machine, device_of),
        machine.problem.topology.devices,
    )
    return replace(found, evaluation=_less_stored(evaluation, found))


def _less_stored(evaluation: Evaluation, found: Offloaded) -> Evaluation:
    """Return the costs in which the host, where it computes, has no room that is taken."""
    stored = found.stored_bytes()
    rows = list(evaluation.devices)
    for use in rows[len(found.devices) :]:
        rows[use.logical_id] = replace(
            use,
            memory_bytes=use.memory_bytes - stored,
            reserved_bytes=use.reserved_bytes + stored,
        )
    return replace(evaluation, devices=tuple(rows))


def _searched(machine: Machine, ways: IntArray) -> tuple[Problem, list[int]]:
    """Return what a mode places, and what each device has for it.

    Offloaded weights count nothing, nor does the cache of modules on the host.
    """
    graph, base = machine.problem.graph, machine.problem
    gone, hosted = _in_tiers(machine, ways), _hosted_ops(machine, ways)
    read_elsewhere = np.zeros(graph.n_values, dtype=np.bool_)
    read_elsewhere[graph.reads[~hosted[graph.readers]]] = True
    inputs = (graph.value_producer < 0) & ~read_elsewhere
    bare = replace(
        graph,
        weight_bytes=np.where(gone, 0, graph.weight_bytes),
        value_alloc_bytes=np.where(inputs, 0, graph.value_alloc_bytes),
    )
    room = _most_buffer(machine, ways)
    less = tuple(
        replace(
            spec,
            memory_bytes=max(1, spec.memory_bytes - room),
            reserved_bytes=spec.total_bytes - max(1, spec.memory_bytes - room),
        )
        for spec in base.topology.devices
    )
    topology = replace(base.topology, devices=less)
    costs = base.costs._replace(op_time_s=_times_with_waits(machine, ways, hosted))
    problem = replace(base, graph=bare, topology=topology, costs=costs, memory=memory_tables(bare))
    return problem, topology.memory_bytes.tolist()


def _times_with_waits(machine: Machine, ways: IntArray, hosted: BoolArray) -> FloatArray:
    """Return the times of operators on the devices, shape (n, D); of `hosted` ones on the host.

    The time that a copy is waited for is in that of the first operator which needs it.
    """
    times = machine.problem.costs.op_time_s.copy()
    if hosted.any():
        times[hosted] = machine.with_host.costs.op_time_s[hosted, -1:]
    since, previous = 0.0, -1
    op_s = times.min(axis=1)
    for index in np.flatnonzero(ways == STREAMED).tolist():
        first = int(machine.units[index].ops[0])
        if machine.options.overlap and previous >= 0:
            since = float(op_s[previous:first].sum())
        times[first] += max(0.0, float(machine.copy_s[index]) - since)
        previous = first
    return times


def _most_buffer(machine: Machine, ways: IntArray) -> int:
    """Return the room for copies that any device may need."""
    streamed = [machine.units[i] for i in np.flatnonzero(ways == STREAMED).tolist()]
    if not machine.options.overlap:
        return max((unit.largest_bytes for unit in streamed), default=0)
    sizes = [0, *(unit.weight_bytes for unit in streamed)]
    return max((a + b for a, b in pairwise(sizes)), default=0)


def _in_tiers(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which weights lie in a tier, shape (W,)."""
    gone = np.zeros(len(machine.problem.graph.weight_names), dtype=np.bool_)
    for unit in np.flatnonzero(ways != RESIDENT).tolist():
        gone[machine.units[unit].weights] = True
    return gone


def _hosted_ops(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which operators run on the host: those of hosted units."""
    hosted = np.zeros(machine.problem.graph.n_ops, dtype=np.bool_)
    for unit in np.flatnonzero(ways == HOSTED).tolist():
        hosted[machine.units[unit].ops] = True
    return hosted


def _on_host(machine: Machine, ways: IntArray, device_of: IntArray) -> IntArray:
    """Return the placement with hosted operators on the host."""
    return np.where(_hosted_ops(machine, ways), machine.problem.topology.n_devices, device_of)


def _host_bytes(machine: Machine, device_of: IntArray) -> int:
    """Return what the host holds for modules that run there."""
    host = machine.problem.topology.n_devices
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    return int(peak_on_device(machine.problem.memory, device_of, host, change))


def _stored(machine: Machine, ways: IntArray, device_of: IntArray) -> BoolArray:
    """Return which units' weights lie on the disk: the last, where the host is full.

    Raises:
        InfeasibleError: where the disk is full too, or there is none.

    """
    host, disk = machine.tiers.host, machine.tiers.disk
    on_disk = np.zeros(len(machine.units), dtype=np.bool_)
    left = host.memory_bytes - _host_bytes(machine, device_of)
    kept = disk.memory_bytes if disk else 0
    needed = int(machine.sizes[ways != RESIDENT].sum())
    streamed = np.flatnonzero(ways == STREAMED)
    if disk and int(machine.sizes[streamed].sum()) > left >= 0:
        passing = _most_buffer(machine, ways)  # what is read from the disk passes through
        if passing > left:
            raise InfeasibleError(
                f"blocks that come from {disk.name} pass through {show_bytes(passing)} of"
                f" {host.name}, which has {show_bytes(host.memory_bytes)}, {show_bytes(left)} of"
                " it free; give more host memory",
                needed_bytes=host.memory_bytes - left + passing,
                available_bytes=host.memory_bytes,
            )
        left -= passing
    for unit in streamed.tolist():
        size = int(machine.sizes[unit])
        if size <= left:
            left -= size
            continue
        on_disk[unit] = True
        kept -= size
    if left < 0 or kept < 0:
        names = [f"{tier.name} {show_bytes(tier.memory_bytes)}" for tier in (host, disk) if tier]
        raise InfeasibleError(
            f"weights of {show_bytes(needed)} must lie in tiers, which are full:"
            f" {', '.join(names)}; give more host memory, a disk such as +nvme500gb, or more"
            " devices",
            needed_bytes=needed,
            available_bytes=host.memory_bytes + (disk.memory_bytes if disk else 0),
        )
    return on_disk


class _Costed(NamedTuple):
    """A plan whose times are still to be simulated."""

    problem: Problem
    copies: list[Copy]
    streams: Streams
    parts: list[str]
    """The modules that `Copy.unit` numbers."""


def _costed(machine: Machine, ways: IntArray, on_disk: BoolArray, device_of: IntArray) -> _Costed:
    """Return the devices, and the host if anything runs there; and what is copied, and how."""
    hosted = bool((ways == HOSTED).any())
    base = machine.with_host if hosted else machine.problem
    parts, part_of, sources = _parts(machine, ways, on_disk)
    bare = replace(base.graph, weight_bytes=np.where(part_of >= 0, 0, base.graph.weight_bytes))
    problem = replace(base, graph=bare, memory=memory_tables(bare))
    options, rate = machine.options, machine.link[0]
    copies = copies_of(base.graph, base.graph.weight_bytes, device_of, part_of, sources)
    devices = problem.topology.n_devices
    disk = machine.tiers.disk
    streams = Streams(
        np.full(devices, rate),
        np.full(devices, machine.link[1] + options.copy_latency_s),
        overlap=options.overlap,
        host_bytes_per_s=options.host_bytes_per_s or np.inf,
        disk_bytes_per_s=float(disk.bytes_per_s or np.inf) if disk else np.inf,
    )
    return _Costed(problem, copies, streams, parts)


def _parts(
    machine: Machine, ways: IntArray, on_disk: BoolArray
) -> tuple[list[str], IntArray, list[Source]]:
    """Return the modules that are copied at once, that of each weight (W,), and where they lie.

    With overlap whole units; else each module that holds weights itself, when it is called.
    """
    names = machine.problem.graph.weight_names
    part_of = np.full(len(names), -1, dtype=np.int64)
    parts: dict[str, int] = {}
    sources: list[Source] = []
    of_unit = _sources(machine, ways, on_disk)
    for unit in np.flatnonzero(ways == STREAMED).tolist():
        for weight in machine.units[unit].weights.tolist():
            path = machine.units[unit].path if machine.options.overlap else owner(names[weight])
            if path not in parts:
                parts[path] = len(parts)
                sources.append(of_unit[unit])
            part_of[weight] = parts[path]
    return list(parts), part_of, sources


def _sources(machine: Machine, ways: IntArray, on_disk: BoolArray) -> list[Source]:
    """Return where each unit's weights lie: pinned memory as far as it goes."""
    options = machine.options
    pinned = machine.tiers.host.memory_bytes if options.overlap else 0
    if options.pinned_bytes is not None:
        pinned = min(pinned, options.pinned_bytes)
    sources = []
    for unit, way in enumerate(ways.tolist()):
        size = int(machine.sizes[unit])
        is_pinned = way == STREAMED and size <= pinned
        if is_pinned and not on_disk[unit]:
            pinned -= size
        share = options.pinned_share if is_pinned else options.pageable_share
        sources.append(Source(share, bool(on_disk[unit])))
    return sources


def _does_not_fit(machine: Machine) -> InfeasibleError:
    """Return the error where not even weights that lie elsewhere make room."""
    n = machine.problem.graph.n_ops
    bare, capacity = _searched(machine, np.full(len(machine.units), STREAMED, dtype=np.int64))
    everywhere = np.zeros(n, dtype=np.int64)
    held = peak_on_device(bare.memory, everywhere, 0, np.empty(n + 1, dtype=np.int64))
    return InfeasibleError(
        f"with all weights that can be in tiers, tensors of {show_bytes(int(held))} and room"
        f" for copies of {show_bytes(_most_buffer(machine, np.full(len(machine.units), STREAMED)))}"
        f" do not fit the devices' {show_bytes(sum(capacity))}; take larger devices, a smaller"
        " batch or a shorter context",
        needed_bytes=int(held),
        available_bytes=sum(capacity),
    )
