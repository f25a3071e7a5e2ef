"""Which modules of a model that the devices do not hold run with tensors in a tier, and how.

A module is *streamed*, its weights copied to a device for as long as it runs, or runs on the host;
so is its cache, where that lies in a tier. A tier is no device to a mode: what is offloaded is
chosen first, least time a byte first and no more than must be (what still fits comes back), caches
where weights do not make room, then the mode places all on the devices, and what runs on the host
goes there.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import Copy, Push, run_copies, with_streams
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.placement.device_order import used_weight_bytes
from fxpart.placement.offload.bound import bound_s, least_load_s
from fxpart.placement.offload.costed import costed
from fxpart.placement.offload.gathered_weights import WEIGHT_POOL
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.searched import hosted_ops, most_buffer, searched_problem
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED, Unit
from fxpart.placement.offload.ways import put_back_order, stream_order, ways_of
from fxpart.placement.search.fill import place_all

__all__ = [
    "LeastOnDevices",
    "Offloaded",
    "Place",
    "finished",
    "least_on_devices",
    "less_stored",
    "offload",
]

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
    """Whether what of each unit is streamed lies on the disk."""
    copies: tuple[Copy, ...]
    copied: tuple[str, ...]
    """The modules that the copies number as units."""
    waited_s: float
    """By how much copies make the latency longer."""
    hosted_bytes: int
    """What the host needs for the modules that run there."""
    devices: tuple[DeviceSpec, ...]
    """Those beside the tiers."""
    tier_bytes: IntArray
    """Of each unit, what lies in a tier beside what the host needs for modules that run there."""
    cache_bytes: IntArray
    """The part of that which is a cache."""
    pushes: tuple[Push, ...] = ()
    passing_bytes: int = 0
    """Room in the host's memory through which passes what is read from the disk."""
    machine: Machine | None = None
    """What was planned on; None of a training step."""
    frozen_bytes: int = 0
    """Of a training step's weights that lie in the host's memory, those that nothing updates."""

    @property
    def trains(self) -> bool:
        """Whether it is a training step, whose units are weights with their states."""
        return bool(self.problem.graph.is_update.any())

    def stored_bytes(self, *, disk: bool = False) -> int:
        """Return the bytes of what is streamed in the host's memory, or on the disk."""
        return int(self.tier_bytes[self.on_disk == disk].sum())

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of weights that are copied to devices for a training step."""
        return sum(copy.size_bytes for copy in self.copies if copy.pool == WEIGHT_POOL)

    @property
    def beside_bytes(self) -> int:
        """Bytes of the host's memory that are taken beside what its own modules need."""
        return self.stored_bytes() + self.passing_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are copied to devices for one input."""
        to_devices = sum(push.size_bytes for push in self.pushes if not push.to_host)
        return to_devices + sum(copy.size_bytes for copy in self.copies)


def offload(machine: Machine, place: Place, *, everything: bool = False) -> Offloaded:
    """Return a plan for a model that the devices of a machine do not hold; `place` is the mode.

    With `everything` all lies in tiers that can, else no more than must.

    Raises:
        InfeasibleError: when the tiers are full, or the devices cannot hold what must be there.

    """
    options = machine.options
    if everything:
        most = least_on_devices(machine)
        return finished(most.machine, most.ways, place)
    caches = _cache_order(machine) if options.stream and options.cache != "none" else []
    if options.cache == "all":
        return _offloaded(_with_caches(machine, caches), place)
    try:
        return _offloaded(machine, place)
    except InfeasibleError:
        least = _least_caches(machine, caches)
        if least is None:
            raise
    counts = sorted({least, (least + len(caches)) // 2, len(caches)})
    for count in counts[:-1]:
        with suppress(InfeasibleError):
            return _offloaded(_with_caches(machine, caches[:count]), place)
    return _offloaded(_with_caches(machine, caches), place)


def _cache_order(machine: Machine) -> list[int]:
    """Return the units that have a cache, in the order in which those go to a tier."""
    return [unit for unit in stream_order(machine) if machine.units[unit].cache_bytes]


def _with_caches(machine: Machine, units: Sequence[int]) -> Machine:
    cached = np.zeros(len(machine.units), dtype=np.bool_)
    cached[list(units)] = True
    return replace(machine, cached=cached)


def _least_caches(machine: Machine, caches: Sequence[int]) -> int | None:
    """Return of how few units the cache must go, all weights streamed; None if all do not help."""

    def fits(count: int) -> bool:
        most = _with_caches(machine, caches[:count])
        return place_all(*searched_problem(most, np.full(len(machine.units), STREAMED))) is not None

    if not (caches and fits(len(caches))):
        return None
    return bisect_left(range(1, len(caches)), True, key=fits) + 1


def _offloaded(machine: Machine, place: Place) -> Offloaded:
    """Return a plan with the caches that lie in tiers given.

    Raises:
        InfeasibleError: when the tiers are full, or the devices cannot hold what must be there.

    """
    options = machine.options
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


class LeastOnDevices(NamedTuple):
    """A plain placement with all in tiers that can lie there."""

    machine: Machine
    ways: IntArray
    on_disk: BoolArray
    device_of: IntArray


def least_on_devices(machine: Machine) -> LeastOnDevices:
    """Return a plain placement with all in tiers that can lie there.

    Raises:
        InfeasibleError: when the tiers are full, or the devices cannot hold what must be there.

    """
    options = machine.options
    if options.stream and options.cache != "none":
        machine = _with_caches(machine, _cache_order(machine))
    ways = np.full(len(machine.units), STREAMED if options.stream else HOSTED, dtype=np.int64)
    device_of = place_all(*searched_problem(machine, ways))
    if device_of is None:
        raise _does_not_fit(machine)
    device_of = _on_host(machine, ways, device_of)
    return LeastOnDevices(machine, ways, _stored(machine, ways, device_of), device_of)


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
    resident = np.full(len(machine.units), RESIDENT, dtype=np.int64)
    device_of = place_all(*searched_problem(machine, resident)) if not low else None
    if device_of is not None:  # caches made room enough
        return _timed(machine, 0, share, resident, device_of)
    fitting: tuple[IntArray, IntArray, int] | None = None
    target, smallest = high, int(machine.sizes.min(initial=total))
    for _ in range(_TRIES):
        ways = ways_of(machine, target, share)
        device_of = place_all(*searched_problem(machine, ways))
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
    return _timed(machine, target, share, *_refilled(machine, ways, device_of))


def _timed(
    machine: Machine, target: int, share: float, ways: IntArray, device_of: IntArray
) -> _Least:
    device_of = _on_host(machine, ways, device_of)
    on_disk = _stored(machine, ways, device_of)
    final = costed(machine, ways, on_disk, device_of)
    timed, run = run_copies(
        final.problem.costs, device_of, final.copies, final.streams, final.pushes
    )
    latency_s, _ = schedule(timed, device_of, schedule_log(timed))
    return _Least(max(float(latency_s), run.pushed_s), target, share, ways)


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
        placed = place_all(*searched_problem(machine, fewer))
        if placed is None:
            too_large[way] = float(machine.sizes[unit])
        else:
            ways, device_of = fewer, placed
    return ways, device_of


def finished(machine: Machine, ways: IntArray, place: Place) -> Offloaded:
    """Return the plan with the mode's own placement."""
    problem, _ = searched_problem(machine, ways)
    device_of = _on_host(machine, ways, place(problem).device_of)
    on_disk = _stored(machine, ways, device_of)
    what = costed(machine, ways, on_disk, device_of)
    final = what.problem
    assignment = partition_by_device(final.graph, device_of)
    evaluation = with_streams(
        final,
        assignment,
        what.copies,
        what.streams,
        pushes=what.pushes,
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
        tuple(what.copies),
        tuple(what.parts),
        evaluation.latency_s - float(without),
        _host_bytes(machine, device_of),
        machine.problem.topology.devices,
        machine.tier_sizes(ways),
        np.where(ways == HOSTED, 0, machine.cache_sizes),
        tuple(what.pushes),
        most_buffer(machine, ways) if on_disk.any() else 0,
        machine,
    )
    return replace(found, evaluation=less_stored(evaluation, found))


def less_stored(evaluation: Evaluation, found: Offloaded) -> Evaluation:
    """Return the costs in which the host, where it computes, has no room that is taken."""
    stored = found.beside_bytes
    rows = list(evaluation.devices)
    for use in rows[len(found.devices) :]:
        rows[use.logical_id] = replace(
            use,
            memory_bytes=use.memory_bytes - stored,
            reserved_bytes=use.reserved_bytes + stored,
        )
    return replace(evaluation, devices=tuple(rows))


def _on_host(machine: Machine, ways: IntArray, device_of: IntArray) -> IntArray:
    """Return the placement with hosted operators on the host."""
    return np.where(hosted_ops(machine, ways), machine.problem.topology.n_devices, device_of)


def _host_bytes(machine: Machine, device_of: IntArray) -> int:
    """Return what the host holds for modules that run there."""
    host = machine.problem.topology.n_devices
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    return int(peak_on_device(machine.problem.memory, device_of, host, change))


def _stored(machine: Machine, ways: IntArray, device_of: IntArray) -> BoolArray:
    """Return of which units what is streamed lies on the disk: the last, where the host is full.

    Raises:
        InfeasibleError: where the disk is full too, or there is none.

    """
    host, disk = machine.tiers.host, machine.tiers.disk
    on_disk = np.zeros(len(machine.units), dtype=np.bool_)
    left = host.memory_bytes - _host_bytes(machine, device_of)
    kept = disk.memory_bytes if disk else 0
    sizes = machine.tier_sizes(ways)
    needed = int(sizes.sum() + machine.sizes[ways == HOSTED].sum())
    if disk and int(sizes.sum()) > left >= 0:
        passing = most_buffer(machine, ways)  # what is read from the disk passes through
        if passing > left:
            raise InfeasibleError(
                f"blocks that come from {disk.name} pass through {show_bytes(passing)} of"
                f" {host.name}, which has {show_bytes(host.memory_bytes)}, {show_bytes(left)} of"
                " it free; give more host memory",
                needed_bytes=host.memory_bytes - left + passing,
                available_bytes=host.memory_bytes,
            )
        left -= passing
    for unit in np.flatnonzero(sizes).tolist():
        size = int(sizes[unit])
        if size <= left:
            left -= size
            continue
        on_disk[unit] = True
        kept -= size
    if left < 0 or kept < 0:
        names = [f"{tier.name} {show_bytes(tier.memory_bytes)}" for tier in (host, disk) if tier]
        raise InfeasibleError(
            f"{'caches' if (ways == RESIDENT).all() else 'weights'} of {show_bytes(needed)} must"
            f" lie in tiers, which are full:"
            f" {', '.join(names)}; give more host memory, a disk such as +nvme500gb, or more"
            " devices",
            needed_bytes=needed,
            available_bytes=host.memory_bytes + (disk.memory_bytes if disk else 0),
        )
    return on_disk


def _does_not_fit(machine: Machine) -> InfeasibleError:
    """Return the error where not even weights that lie elsewhere make room."""
    n = machine.problem.graph.n_ops
    bare, capacity = searched_problem(
        machine, np.full(len(machine.units), STREAMED, dtype=np.int64)
    )
    everywhere = np.zeros(n, dtype=np.int64)
    held = peak_on_device(bare.memory, everywhere, 0, np.empty(n + 1, dtype=np.int64))
    return InfeasibleError(
        "with all weights that can be in tiers, "
        + ("caches too, " if machine.cached is not None else "")
        + f"tensors of {show_bytes(int(held))} and room"
        f" for copies of {show_bytes(most_buffer(machine, np.full(len(machine.units), STREAMED)))}"
        f" do not fit the devices' {show_bytes(sum(capacity))}; take larger devices, a smaller"
        " batch or a shorter context",
        needed_bytes=int(held),
        available_bytes=sum(capacity),
    )
