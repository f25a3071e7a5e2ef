"""Cut a row of units into consecutive stages with the smallest largest load.

The load of a stage is the longer of its compute time and the time of a link for its transfers to
others: transfers overlap with computation, so this is the interval between inputs. If links differ,
or there are many units, a link is assumed to carry everything that crosses the cut before it.

The load is bisected: for a bound, the sets of cuts at which the first k stages may end are computed
one from the other in O(U). Assigning chains of tasks to processors in order is an old problem:
Bokhari, Partitioning problems in parallel, pipelined, and distributed computing. IEEE Trans.
Comput. 37(1), 1988, doi:10.1109/12.75137. Memory is evaluated only where a stage may begin from the
left and end to the right, which is rare until it binds.
"""

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.tables import MemoryTables
from fxpart.placement.stages.even import BoolArray, alike_links, most_even
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.stretch_bytes import (
    ONE,
    Flight,
    KnownBytes,
    StretchBytes,
    StretchScratch,
    UnitTables,
    known_needs,
    needed_bytes,
)
from fxpart.support.compiled import compiled

__all__ = ["EQUAL_LOADS", "Reach", "Slots", "StageSolver", "Stretch", "settle"]


# How far a stage can extend before its device is full; evaluated only where memory can bind.


class Reach(NamedTuple):
    """Stretches known to fit a device of one size, and known not to fit."""

    fits: IntArray
    """Furthest end of a stage from each unit that is known to fit. Length U + 1."""
    fails: IntArray
    """Nearest end that is known not to fit; U + 1 for none. Length U + 1."""
    memory_bytes: int
    flight: Flight


def _reach_of(m: MemoryTables, line: StageLine, memory_bytes: int, flight: Flight) -> Reach:
    """Return the initial `Reach` of a device, from weights only. O(U + uses)."""
    of_use = line.unit_of[np.repeat(np.arange(len(line.unit_of)), np.diff(m.use_start))]
    order = np.argsort(of_use, kind="stable")
    use_start = np.searchsorted(of_use[order], np.arange(line.n_units + 1))
    fails = _weights_fail(use_start, m.uses[order], m.weight_bytes, memory_bytes)
    return Reach(np.arange(line.n_units + 1), fails, memory_bytes, flight)


@compiled
def _weights_fail(
    use_start: IntArray, uses: IntArray, weight_bytes: IntArray, memory_bytes: int
) -> IntArray:
    """Return the nearest cut up to which the weights from each unit exceed memory; U + 1 for none.

    Args:
        use_start: CSR starts into `uses` by unit. Length U + 1.
        uses: weights that each unit uses.
        weight_bytes: bytes of each weight.
        memory_bytes: memory of each device.

    """
    count = use_start.shape[0] - 1
    fails = np.full(count + 1, count + 1, dtype=np.int64)
    seen = np.zeros(weight_bytes.shape[0], dtype=np.int64)
    end, used = 0, 0
    for start in range(count):
        while end < count and used <= memory_bytes:
            for i in range(use_start[end], use_start[end + 1]):
                used += weight_bytes[uses[i]] if seen[uses[i]] == 0 else 0
                seen[uses[i]] += 1
            end += 1
        if used <= memory_bytes:
            break
        fails[start] = end
        for i in range(use_start[start], use_start[start + 1]):
            seen[uses[i]] -= 1
            used -= weight_bytes[uses[i]] if seen[uses[i]] == 0 else 0
    return fails


@compiled
def settle(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    known: KnownBytes,
    cuts: IntArray,
    starts: IntArray,
    targets: IntArray,
    reach: Reach,
) -> None:
    """Determine for each cut of `starts` whether a stage may extend to `targets`, or else how far.

    Cut k of the row is cut ``cuts[k]`` of `units`.

    Without a backward, more units never need less memory, since values read from before the stretch
    stay received regardless of its length. So the furthest end is found by doubling and bisection,
    beginning with that of the previous start. It is not monotone in the start, as a view may be
    larger than its base.
    """
    last_fit = 0
    for start in starts:
        low, high = reach.fits[start], reach.fails[start]
        probe, step = min(targets[start], high - 1), 0
        if targets[start] <= low or high - low <= 1:
            last_fit = low
            continue
        while high - low > 1 and low < targets[start]:
            if not low < probe < high:
                probe = (low + high) // 2
            needs = known_needs(m, units, scratch, known, cuts[start], cuts[probe], reach.flight)
            if needs <= reach.memory_bytes:
                low, probe = probe, probe + step
            else:
                high, probe = probe, (probe - step if step else last_fit)
            step = max(1, 2 * step)
        reach.fits[start], reach.fails[start] = low, high
        last_fit = low


EQUAL_LOADS = 1e-9
"""Relative difference below which loads count as equal, due to rounding of sums."""

MOST_PAIRED = 1024
"""Most units for which the transfers of each possible stage are evaluated."""
_MOST_HALVINGS = 200
"""Enough for any float, since a load can be smaller than the total by any factor."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stage: units `begin` to `end` - 1 on a device."""

    begin: int
    end: int
    device: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Devices available to stages, in order."""

    devices: Sequence[int]
    """Logical id of the device of each slot."""
    memory_bytes: Sequence[int]
    """Memory available to a stage on each slot."""
    may_skip: bool
    """Whether slots may stay empty; otherwise each gets at least one unit."""
    flights: Sequence[Flight] = ()
    """Microbatches of a stage on each slot; empty for one each."""
    prefer_more: bool = False
    """Whether more stages are better than fewer if slots may stay empty and loads are equal."""


@compiled
def _load_limits(before_s: FloatArray, bound_s: float) -> IntArray:
    """Return the furthest cut at which a stage from each unit ends within the bound. O(U)."""
    count = before_s.shape[0]
    limit = np.empty(count, dtype=np.int64)
    end = 0
    for start in range(count):
        end = max(end, start)
        while end + 1 < count and before_s[end + 1] - before_s[start] <= bound_s:
            end += 1
        limit[start] = end
    return limit


@compiled
def _ahead(starts: BoolArray, limit: IntArray) -> BoolArray:
    """Return the possible ends of a stage that begins at one of `starts`."""
    count = starts.shape[0]
    change = np.zeros(count + 1, dtype=np.int64)
    for start in range(count):
        if starts[start] and limit[start] > start:
            change[start + 1] += 1
            change[limit[start] + 1] -= 1
    reachable = np.empty(count, dtype=np.bool_)
    covered = 0
    for end in range(count):
        covered += change[end]
        reachable[end] = covered > 0
    return reachable


@compiled
def _ahead_within(
    starts: BoolArray, limit: IntArray, busy_s: FloatArray, bound_s: float
) -> BoolArray:
    """Return the possible ends of a stage whose busy time is within the bound. O(U^2)."""
    reachable = np.zeros(starts.shape[0], dtype=np.bool_)
    for start in range(starts.shape[0]):
        if starts[start]:
            for end in range(start + 1, limit[start] + 1):
                if busy_s[start, end] <= bound_s:
                    reachable[end] = True
    return reachable


@compiled
def _behind(ends: BoolArray, limit: IntArray) -> BoolArray:
    """Return the possible begins of a stage that ends at one of `ends`."""
    count = ends.shape[0]
    upto = np.zeros(count + 1, dtype=np.int64)
    for end in range(count):
        upto[end + 1] = upto[end] + ends[end]
    reachable = np.empty(count, dtype=np.bool_)
    for start in range(count):
        reachable[start] = upto[limit[start] + 1] > upto[start + 1]
    return reachable


def _bisect(allows: Callable[[float], bool], high_s: float, low_s: float = 0.0) -> float:
    """Return (nearly) the smallest bound for which `allows` is true, by bisection.

    `allows` must be monotone, and true for `high_s`.
    """
    for _ in range(_MOST_HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        if high_s - low_s <= 1e-12 * high_s or not low_s < middle_s < high_s:
            break
        if allows(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


class StageSolver:
    """Solver for one row of units on some slots, with state shared between bounds."""

    def __init__(self, line: StageLine, slots: Slots) -> None:
        self._line = line
        # Devices of equal speed share load limits.
        self._table, kind = np.unique(line.load_before_s, axis=0, return_inverse=True)
        self._kind_of_device: list[int] = kind.reshape(-1).tolist()
        # Shared with solvers for other slots.
        self._reach_of = dict[tuple[int, Flight], Reach]()
        self._times_of_link = dict[tuple[float, ...], FloatArray]()
        self._sending_of_link = dict[tuple[float, ...], FloatArray]()
        self._use(slots)

    def _use(self, slots: Slots) -> None:
        self._slots = slots
        self._slot_reach = self._reaches()
        self._kind = [self._kind_of_device[device] for device in slots.devices]
        self._sources = self._links()
        self._sending_s = self._sends()
        self._unlimited_s: float | None = None
        """The smallest bound on loads that allows a cut without regard to memory, once known."""

    def with_memory(self, memory_bytes: Sequence[int]) -> "StageSolver":
        """Return a solver for slots with other memory; it shares what does not depend on that."""
        solver = copy(self)
        solver._slots = replace(self._slots, memory_bytes=memory_bytes)
        solver._slot_reach = solver._reaches()
        return solver

    def with_slots(self, slots: Slots) -> "StageSolver":
        """Return a solver for other slots; it shares what is known of devices and links."""
        solver = copy(self)
        solver._use(slots)
        return solver

    def _reaches(self) -> list[Reach]:
        """Return the `Reach` of each slot, shared by those of equal memory and flight."""
        slots, memory = self._slots, self._line.stretches.memory
        flights = slots.flights or [ONE] * len(slots.memory_bytes)
        kinds = list(zip(slots.memory_bytes, flights, strict=True))
        for kind in kinds:
            if kind not in self._reach_of:
                self._reach_of[kind] = _reach_of(memory, self._line, *kind)
        return [self._reach_of[kind] for kind in kinds]

    def _link_kind(self, source: int, target: int) -> tuple[float, ...]:
        tables = (self._line.s_per_byte, self._line.link_latency_s)
        pairs = ((source, target), (target, source))
        return tuple(float(table[pair]) for table in tables for pair in pairs)

    def _links(self) -> list[list[tuple[list[int], FloatArray]]]:
        """Return for each slot the slots from which a stage may receive, and the time by cut.

        Slots with equal links are grouped; the time is `StageLine.link_s`.
        """
        line, slots, times = self._line, self._slots, self._times_of_link
        links = []
        for slot, target in enumerate(slots.devices):
            groups = []
            for group in alike_links(line, slots.devices, slot, may_skip=slots.may_skip):
                source = slots.devices[group[0]]
                kind = self._link_kind(source, target)
                if kind not in times:
                    times[kind] = line.link_s(source, target)
                groups.append((group, times[kind]))
            links.append(groups)
        return links

    def _sends(self) -> FloatArray | None:
        """Return the sending time of each possible stage, if links are equal and units few."""
        line, slots, known = self._line, self._slots, self._sending_of_link
        links_equal = all(len(groups) <= 1 for groups in self._sources)
        count, links = len(slots.devices), {id(link_s) for g in self._sources for _, link_s in g}
        few = line.n_units <= MOST_PAIRED and line.n_units * count <= MOST_PAIRED * 64
        if not links_equal or len(links) != 1 or not few:
            return None
        last = len(self._sources) - 1
        group, _ = self._sources[last][0]
        pair = slots.devices[group[0]], slots.devices[last]
        kind = self._link_kind(*pair)
        if kind not in known:
            known[kind] = line.sending_s(*pair)
        return known[kind]

    def largest_s(self, stages: Sequence[Stretch]) -> float:
        """Return the largest load of `stages`."""
        before_s = self._line.load_before_s
        loads = [before_s[s.device, s.end] - before_s[s.device, s.begin] for s in stages]
        if self._sending_s is not None:
            loads += [self._sending_s[s.begin, s.end] for s in stages]
        else:
            for source, target in itertools.pairwise(stages):
                loads.append(self._line.link_s(source.device, target.device)[target.begin])
        return float(max(loads))

    def least_load(self, at_most_s: float = np.inf) -> list[Stretch] | None:
        """Return the stages with the smallest largest load, or None if memory allows no cut.

        Ties (up to `EQUAL_LOADS`) go to fewer stages (`Slots.prefer_more`: to more), then to the
        most even ones (`fxpart.placement.stages.even`). None too if the load exceeds `at_most_s`,
        which is found out in O(U) per slot.
        """
        if at_most_s < np.inf and self._cuts(at_most_s) is None:
            return None
        if self._sending_s is not None:
            carried_s = [float(self._sending_s.max())]
        else:
            carried_s = [float(link_s.max()) for groups in self._sources for _, link_s in groups]
        most_s = min(max(float(self._table.max()), *carried_s, 0.0), at_most_s)
        if self._unlimited_s is None:
            self._unlimited_s = _bisect(
                lambda bound_s: self._cuts(bound_s, with_memory=False) is not None, most_s
            )
        bound_s = self._first_bound(self._unlimited_s * (1 + EQUAL_LOADS), most_s)
        return None if bound_s is None else self._choose(bound_s)

    def stage_bytes(self, begin: int, end: int) -> StretchBytes:
        """Return the bytes of units `begin` to `end` - 1 (not empty) for one microbatch."""
        cuts = self._line.cuts
        return self._line.stretches.bytes_of(int(cuts[begin]), int(cuts[end]))

    def peak_bytes(self, begin: int, end: int, slot: int = 0) -> int:
        """Return the memory needed for units `begin` to `end` - 1 on a slot."""
        if begin == end:
            return 0
        return int(needed_bytes(self.stage_bytes(begin, end), self._slot_reach[slot].flight))

    def fits(self, stage: Stretch) -> bool:
        """Return whether a stage fits its device, which must have one slot."""
        slot = self._slots.devices.index(stage.device)
        return self.peak_bytes(stage.begin, stage.end, slot) <= self._slots.memory_bytes[slot]

    def forbid(self, stage: Stretch) -> None:
        """Forbid stages with the same begin and the same or a later end, on such a slot."""
        reach = self._slot_reach[self._slots.devices.index(stage.device)]
        reach.fits[stage.begin] = min(int(reach.fits[stage.begin]), stage.end - 1)
        reach.fails[stage.begin] = min(int(reach.fails[stage.begin]), stage.end)

    def furthest(self, begin: int) -> int:
        """Return the furthest end of a stage from `begin` on the first slot."""
        reach, count = self._slot_reach[0], self._line.n_units
        targets = np.full(count + 1, count, dtype=np.int64)
        self._settle(np.array([begin], dtype=np.int64), targets, reach)
        return int(reach.fits[begin])

    def _settle(self, starts: IntArray, wanted: IntArray, reach: Reach) -> None:
        if not len(starts):
            return
        stretches, cuts = self._line.stretches, self._line.cuts
        with stretches.lock:
            stretches.make_room()
            settle(
                stretches.memory,
                stretches.units,
                stretches.scratch,
                stretches.known,
                cuts,
                starts,
                wanted,
                reach,
            )

    def _first_bound(self, least_s: float, most_s: float) -> float | None:
        """Return the smallest bound with a cut that fits; `least_s` is that without memory."""
        if self._cuts(least_s) is not None:
            return least_s
        low_s, high_s, step = least_s, least_s, 1e-3
        while high_s < most_s:
            high_s = min(most_s, least_s + step * most_s)
            if self._cuts(high_s) is not None:
                return _bisect(lambda bound_s: self._cuts(bound_s) is not None, high_s, low_s) * (
                    1 + EQUAL_LOADS
                )
            low_s, step = high_s, 1.5 * step
        return None

    def _limits(self, bound_s: float) -> list[IntArray]:
        """Return the load limits of a stage on each slot under the bound."""
        by_kind = {kind: _load_limits(self._table[kind], bound_s) for kind in set(self._kind)}
        return [by_kind[kind] for kind in self._kind]

    def _ends_of_rest(self, limits: list[IntArray], bound_s: float) -> list[BoolArray]:
        """Return for each slot, and after the last, the cuts from which the rest may be feasible.

        Only loads, and the fastest link of each slot to an earlier one, are considered.
        """
        ends = np.zeros(self._line.n_units + 1, dtype=np.bool_)
        ends[-1] = True
        reachable = [ends]
        for limit, groups in zip(reversed(limits), reversed(self._sources), strict=True):
            ends = _behind(reachable[-1], limit)
            if groups and self._sending_s is None:
                ends &= np.logical_or.reduce([link_s <= bound_s for _, link_s in groups])
            reachable.append(ends | reachable[-1] if self._slots.may_skip else ends)
        return reachable[::-1]

    def _begins(
        self, slot: int, ends: list[BoolArray], any_end: BoolArray, bound_s: float
    ) -> BoolArray:
        """Return the possible begins of a stage on `slot`, given the `ends` of earlier stages."""
        begins = np.zeros(self._line.n_units + 1, dtype=np.bool_)
        begins[0] = self._slots.may_skip or not slot
        if self._sending_s is not None and slot:
            return begins | (any_end if self._slots.may_skip else ends[-1])
        for group, link_s in self._sources[slot]:
            # Usually all links are equal.
            of_all = len(group) == slot
            joined = any_end if of_all else np.logical_or.reduce([ends[k] for k in group])
            begins |= joined & (link_s <= bound_s)
        return begins

    def _cuts(self, bound_s: float, *, with_memory: bool = True) -> list[IntArray] | None:
        """Return the furthest end of a stage on each slot from each cut, or None if infeasible.

        Values are meaningful only where a stage can begin in a cut of the whole row.
        """
        limits = self._limits(bound_s)
        rest = self._ends_of_rest(limits, bound_s)
        if not rest[0][0]:
            return None
        ends, any_end, furthest = list[BoolArray](), np.zeros(len(rest[0]), dtype=np.bool_), []
        for slot, limit in enumerate(limits):
            begins = self._begins(slot, ends, any_end, bound_s)
            # Memory does not matter where only an empty slot leads on.
            useful = begins & _behind(rest[slot + 1], limit)
            furthest_fit = limit
            if with_memory:
                reach = self._slot_reach[slot]
                self._settle(np.flatnonzero(useful), limit, reach)
                furthest_fit = np.minimum(limit, reach.fits)
            fits = np.where(useful, furthest_fit, np.arange(len(limit)))
            furthest.append(fits)
            if self._sending_s is None:
                ends.append(_ahead(useful, fits))
            else:
                ends.append(_ahead_within(useful, fits, self._sending_s, bound_s))
            any_end = any_end | ends[-1]
        return furthest if (any_end if self._slots.may_skip else ends[-1])[-1] else None

    def _choose(self, bound_s: float) -> list[Stretch]:
        """Return the most even stages within a feasible bound."""
        limits = self._cuts(bound_s)
        assert limits is not None, "the bound was found to allow a cut"
        devices, may_skip = self._slots.devices, self._slots.may_skip
        sending_s = self._sending_s
        stretches = most_even(
            self._line,
            devices,
            limits,
            may_skip=may_skip,
            prefer_more=self._slots.prefer_more,
            link_bound_s=bound_s if sending_s is None else np.inf,
            allowed=None if sending_s is None else sending_s <= bound_s,
        )
        return [Stretch(begin, end, devices[slot]) for begin, end, slot in stretches]
