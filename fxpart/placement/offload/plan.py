"""Choose the modules to offload when a model does not fit the devices, and plan their execution.

A module is either *streamed*, with its weights copied to a device while it runs, or run on the
host; an offloaded cache is streamed too. Modes do not see tiers as devices. First the units to
offload are chosen by least time per byte, and no more than necessary (units that still fit are put
back); caches follow if weights are not enough. Then the mode places everything on the devices, and
modules that run on the host are moved there.
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
from fxpart.errors import InfeasibleError, show_bytes, show_unequal_bytes
from fxpart.placement.device_order import used_weight_bytes
from fxpart.placement.infeasible import describe_devices, describe_reserve
from fxpart.placement.offload.bound import bound_s, least_load_s
from fxpart.placement.offload.copies import costed
from fxpart.placement.offload.gathered_weights import WEIGHT_POOL
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.offloaded_units import put_back_order, stream_order, ways_of
from fxpart.placement.offload.searched_problem import hosted_ops, most_buffer, searched_problem
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED, Unit
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
"""Shares of the offloaded bytes to try streaming."""
_STEPS = 9
"""Number of amounts tried if a mode needs more offloading than plain filling."""
_TRIES = 12
"""Most bisection steps for the least amount to offload."""

Place = Callable[[Problem], Assignment]


@dataclass(frozen=True, eq=False, slots=True)
class Offloaded:
    """A plan for devices and tiers."""

    problem: Problem
    """The problem on the devices, followed by the host if any module runs there. Streamed weights
    take no memory in it."""
    assignment: Assignment
    evaluation: Evaluation
    units: tuple[Unit, ...]
    ways: IntArray
    """`RESIDENT`, `STREAMED` or `HOSTED` for each unit."""
    on_disk: BoolArray
    """Whether the streamed tensors of each unit are on the disk."""
    copies: tuple[Copy, ...]
    copied: tuple[str, ...]
    """The modules indexed by `Copy.unit`."""
    waited_s: float
    """Latency added by copies."""
    hosted_bytes: int
    """Host memory needed by the modules that run there."""
    devices: tuple[DeviceSpec, ...]
    """The devices, without the host."""
    tier_bytes: IntArray
    """Bytes of each unit in a tier, apart from `hosted_bytes`."""
    cache_bytes: IntArray
    """The part of `tier_bytes` for caches."""
    pushes: tuple[Push, ...] = ()
    passing_bytes: int = 0
    """Host buffer for data read from the disk."""
    machine: Machine | None = None
    """The machine of the plan; None for a training step."""
    frozen_bytes: int = 0
    """Weights of a training step in host memory that are not updated."""

    @property
    def trains(self) -> bool:
        """Whether this is a training step, whose units are weights with their optimizer state."""
        return bool(self.problem.graph.is_update.any())

    def stored_bytes(self, *, disk: bool = False) -> int:
        """Return the bytes of streamed tensors in host memory, or on the disk."""
        return int(self.tier_bytes[self.on_disk == disk].sum())

    @property
    def gathered_bytes(self) -> int:
        """Bytes of weights copied to devices for a training step."""
        return sum(copy.size_bytes for copy in self.copies if copy.pool == WEIGHT_POOL)

    @property
    def beside_bytes(self) -> int:
        """Host memory in use apart from `hosted_bytes`."""
        return self.stored_bytes() + self.passing_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes copied to devices for one input."""
        to_devices = sum(push.size_bytes for push in self.pushes if not push.to_host)
        return to_devices + sum(copy.size_bytes for copy in self.copies)


def offload(machine: Machine, place: Place, *, everything: bool = False) -> Offloaded:
    """Return a plan for a model that does not fit the devices; `place` is the mode.

    As little as necessary is offloaded, or with `everything` as much as possible.

    Raises:
        InfeasibleError: if the tiers are full, or the devices cannot hold the remainder.

    """
    options = machine.options
    if everything:
        everything_offloaded = least_on_devices(machine)
        return finished(everything_offloaded.machine, everything_offloaded.ways, place)
    caches = _cache_order(machine) if options.stream and options.cache != "none" else []
    if options.cache == "all":
        return _offloaded(_with_caches(machine, caches), place)
    try:
        return _offloaded(machine, place, _instead_of_weights(machine, caches))
    except InfeasibleError:
        fewest_caches = _least_caches(machine, caches, STREAMED)
        if fewest_caches is None:
            raise
    counts = sorted({fewest_caches, (fewest_caches + len(caches)) // 2, len(caches)})
    for count in counts[:-1]:
        with suppress(InfeasibleError):
            return _offloaded(_with_caches(machine, caches[:count]), place)
    return _offloaded(_with_caches(machine, caches), place)


def _cache_order(machine: Machine) -> list[int]:
    """Return the units with a cache, in the order in which caches are offloaded."""
    return [unit for unit in stream_order(machine) if machine.units[unit].cache_bytes]


def _with_caches(machine: Machine, units: Sequence[int]) -> Machine:
    cached = np.zeros(len(machine.units), dtype=np.bool_)
    cached[list(units)] = True
    return replace(machine, cached=cached, known_units=machine.units)


def _instead_of_weights(machine: Machine, caches: Sequence[int]) -> Machine | None:
    """Return `machine` with as few caches offloaded as make room for all weights, if any do.

    They may be smaller than the weights of as many blocks, which leave a device half empty.
    """
    fewest = _least_caches(machine, caches, RESIDENT)
    return None if fewest is None else _with_caches(machine, caches[:fewest])


def _least_caches(machine: Machine, caches: Sequence[int], way: int) -> int | None:
    """Return the fewest caches to offload with all weights in a `way`; None if all do not do."""

    def fits(count: int) -> bool:
        trial = _with_caches(machine, caches[:count])
        return place_all(*searched_problem(trial, np.full(len(machine.units), way))) is not None

    if not (caches and fits(len(caches))):
        return None
    return bisect_left(range(1, len(caches)), True, key=fits) + 1


def _offloaded(machine: Machine, place: Place, alternative: Machine | None = None) -> Offloaded:
    """Return a plan for given offloaded caches, or for those of the `alternative` if it is faster.

    Raises:
        InfeasibleError: if the tiers are full, or the devices cannot hold the remainder.

    """
    options = machine.options
    shares = _SHARES if machine.computes and options.stream else (float(options.stream),)
    candidates: list[_Least] = []
    refused: InfeasibleError | None = None
    for share in shares:
        try:
            candidates.append(_least_offloaded(machine, share))
        except InfeasibleError as error:
            refused = refused or error
    if not candidates:
        assert refused is not None
        raise refused
    least = min(candidates, key=lambda least: least[:3])
    if alternative is not None:
        other = _least_offloaded(alternative, shares[-1])
        if other.latency_s < least.latency_s:
            with suppress(InfeasibleError):
                return _placed(alternative, other, place)
    return _placed(machine, least, place)


class LeastOnDevices(NamedTuple):
    """A plain placement with everything offloaded that can be."""

    machine: Machine
    ways: IntArray
    on_disk: BoolArray
    device_of: IntArray


def least_on_devices(machine: Machine) -> LeastOnDevices:
    """Return a plain placement with everything offloaded that can be.

    Raises:
        InfeasibleError: if the tiers are full, or the devices cannot hold the remainder.

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
    """The least amount to offload at one share of streamed weights."""

    latency_s: float
    """Latency of a plain placement."""
    target_bytes: int
    """The target passed to `ways_of`."""
    share: float
    ways: IntArray
    """The result of `ways_of`, with units put back that still fit a device."""


def _placed(machine: Machine, least: _Least, place: Place) -> Offloaded:
    """Return the plan of the mode, which may need more offloading than `least`.

    Examples are `single`, or stages that are cut at modules.
    """
    total = int(machine.sizes.sum())
    targets = np.linspace(least.target_bytes, total, _STEPS).astype(np.int64)
    larger_ways = (ways_of(machine, target, least.share) for target in np.unique(targets).tolist())
    refused: InfeasibleError | None = None
    for ways in (least.ways, *larger_ways):
        try:
            return finished(machine, ways, place)
        except InfeasibleError as error:
            refused = error
    assert refused is not None
    raise refused


def _least_offloaded(machine: Machine, share: float) -> _Least:
    """Return the least amount to offload by a plain placement, with a given share streamed.

    Raises:
        InfeasibleError: if the model does not fit even with everything offloaded.

    """
    total = int(machine.sizes.sum())
    room = int(machine.problem.topology.memory_bytes.sum())
    low, high = max(0, used_weight_bytes(machine.problem) - room), total
    resident = np.full(len(machine.units), RESIDENT, dtype=np.int64)
    device_of = place_all(*searched_problem(machine, resident)) if not low else None
    if device_of is not None:  # offloading caches was enough
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
    """Return `ways` and a plain placement after putting units back that still fit.

    The last offloaded unit may be far larger than the shortage.
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
    plan_costs = costed(machine, ways, on_disk, device_of)
    final = plan_costs.problem
    assignment = partition_by_device(final.graph, device_of)
    evaluation = with_streams(
        final,
        assignment,
        plan_costs.copies,
        plan_costs.streams,
        pushes=plan_costs.pushes,
        bound_s=bound_s(machine),
        least_load_s=least_load_s(machine),
    )
    latency_without_copies_s, _ = schedule(final.costs, device_of, schedule_log(final.costs))
    offloaded = Offloaded(
        final,
        assignment,
        evaluation,
        machine.units,
        ways,
        on_disk,
        tuple(plan_costs.copies),
        tuple(plan_costs.parts),
        evaluation.latency_s - float(latency_without_copies_s),
        _host_bytes(machine, device_of),
        machine.problem.topology.devices,
        machine.tier_sizes(ways),
        np.where(ways == HOSTED, 0, machine.cache_sizes),
        tuple(plan_costs.pushes),
        most_buffer(machine, ways) if on_disk.any() else 0,
        machine,
    )
    return replace(offloaded, evaluation=less_stored(evaluation, offloaded))


def less_stored(evaluation: Evaluation, offloaded: Offloaded) -> Evaluation:
    """Return the evaluation with offloading buffers reserved on the host, if it computes."""
    stored = offloaded.beside_bytes
    rows = list(evaluation.devices)
    for use in rows[len(offloaded.devices) :]:
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
    """Return the host memory needed by the modules that run there."""
    host = machine.problem.topology.n_devices
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    return int(peak_on_device(machine.problem.memory, device_of, host, change))


def _stored(machine: Machine, ways: IntArray, device_of: IntArray) -> BoolArray:
    """Return the units whose streamed tensors are on the disk: the last ones, if the host is full.

    Raises:
        InfeasibleError: if the disk is full too, or there is none.

    """
    host, disk = machine.tiers.host, machine.tiers.disk
    on_disk = np.zeros(len(machine.units), dtype=np.bool_)
    spare = host.memory_bytes - _host_bytes(machine, device_of)
    disk_left = disk.memory_bytes if disk else 0
    sizes = machine.tier_sizes(ways)
    needed = int(sizes.sum() + machine.sizes[ways == HOSTED].sum())
    if disk and int(sizes.sum()) > spare >= 0:
        passing = most_buffer(machine, ways)  # buffer for data read from the disk
        if passing > spare:
            raise InfeasibleError(
                f"blocks that come from {disk.name} pass through {show_bytes(passing)} of"
                f" {host.name}, which has {show_bytes(host.memory_bytes)}, {show_bytes(spare)} of"
                " it free; give more host memory",
                needed_bytes=host.memory_bytes - spare + passing,
                available_bytes=host.memory_bytes,
            )
        spare -= passing
    for unit in np.flatnonzero(sizes).tolist():
        size = int(sizes[unit])
        if size <= spare:
            spare -= size
            continue
        on_disk[unit] = True
        disk_left -= size
    if spare < 0:
        raise _full_host(machine, host.memory_bytes - spare)
    if disk_left < 0:
        names = [f"{tier.name} {show_bytes(tier.memory_bytes)}" for tier in (host, disk) if tier]
        raise InfeasibleError(
            f"{'caches' if (ways == RESIDENT).all() else 'weights'} of {show_bytes(needed)} must "
            f"be in tiers, which are full: {', '.join(names)}; give more host memory, a disk such "
            "as +nvme500gb, or more devices",
            needed_bytes=needed,
            available_bytes=host.memory_bytes + (disk.memory_bytes if disk else 0),
        )
    return on_disk


def _full_host(machine: Machine, needed_bytes: int) -> InfeasibleError:
    """Return the error for modules computed on the host that its memory does not hold."""
    host, disk = machine.tiers.host, machine.tiers.disk
    needed, has = show_unequal_bytes(needed_bytes, host.memory_bytes)
    beside = f", and {disk.name} stores only what is streamed to devices" if disk else ""
    streaming = "" if machine.options.stream else ", or set offload=auto or offload=prefetch"
    return InfeasibleError(
        f"modules computed on the host need {needed} of its memory, {host.name} has {has}{beside};"
        f" give more host memory or more devices{streaming}",
        needed_bytes=needed_bytes,
        available_bytes=host.memory_bytes,
    )


def _does_not_fit(machine: Machine) -> InfeasibleError:
    """Return the error if offloading all weights is not enough."""
    n = machine.problem.graph.n_ops
    streamed = np.full(len(machine.units), STREAMED, dtype=np.int64)
    bare, _ = searched_problem(machine, streamed)
    room_bytes, devices = most_buffer(machine, streamed), machine.problem.topology.devices
    memory = [device.memory_bytes for device in devices]
    one_device = np.zeros(n, dtype=np.int64)
    needed_bytes = peak_on_device(bare.memory, one_device, 0, np.empty(n + 1, dtype=np.int64))
    return InfeasibleError(
        "with all weights that can be in tiers, "
        + ("caches too, " if machine.cached is not None else "")
        + f"tensors of {show_bytes(int(needed_bytes))} and room"
        f" for copies of {show_bytes(room_bytes)}{' on each' if len(devices) > 1 else ''}"
        f" do not fit the devices, {describe_devices(memory)}{describe_reserve(devices)}; take"
        " larger devices, a smaller batch or a shorter context",
        needed_bytes=int(needed_bytes) + room_bytes * len(devices),
        available_bytes=sum(memory),
    )
