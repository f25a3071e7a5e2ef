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

from fxpart.core.graph import FloatArray, IntArray, csr
from fxpart.placement.stages.ends import Loads, Senders, furthest_ends
from fxpart.placement.stages.even_cuts import alike_links, most_even
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.reach import Reach, ReachTable, reach_in, settle
from fxpart.placement.stages.stretch_bytes import ONE, Flight, StretchBytes, needed_bytes

__all__ = ["EQUAL_LOADS", "Slots", "StageSolver", "Stretch"]

EQUAL_LOADS = 1e-9
"""Relative difference below which loads count as equal, due to rounding of sums."""

MOST_PAIRED = 1024
"""Most units for which the transfers of each possible stage are evaluated."""
_MOST_HALVINGS = 200
"""Enough for any float, since a load can be smaller than the total by any factor."""
_MARGIN = 1.05
"""Factor on memory. If stages with a backward do not reach the end even with this much more, none
are searched for: a longer stage rarely saves as much."""
_ROUGH = 1e-3
"""Precision of the smallest bound that ignores memory, where the search within memory starts."""


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


class _Bracket(NamedTuple):
    """Two bounds on loads between which the smallest feasible one lies."""

    low_s: float
    """Infeasible, or 0."""
    high_s: float
    """Feasible, if any bound is."""

    def narrowed(self, is_feasible: Callable[[float], bool], precision: float) -> "_Bracket":
        """Return a bracket at most `precision` times its high bound wide, by bisection."""
        low_s, high_s = self
        for _ in range(_MOST_HALVINGS):
            middle_s = 0.5 * (low_s + high_s)
            if high_s - low_s <= precision * high_s or not low_s < middle_s < high_s:
                break
            if is_feasible(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return _Bracket(low_s, high_s)


class StageSolver:
    """Solver for one row of units on some slots, with state shared between bounds."""

    def __init__(self, line: StageLine, slots: Slots) -> None:
        self._line = line
        # Devices of equal speed share load limits. `np.unique` of such long rows would sort them.
        kind_of_row = dict[bytes, int]()
        kinds = [
            kind_of_row.setdefault(row.tobytes(), len(kind_of_row)) for row in line.load_before_s
        ]
        self._table = line.load_before_s[np.unique(kinds, return_index=True)[1]]
        self._kind_of_device: IntArray = np.array(kinds, dtype=np.int64)
        # Shared with solvers for other slots.
        self._reaches = ReachTable(line)
        self._times_of_link = dict[tuple[float, ...], FloatArray]()
        self._sending_of_link = dict[tuple[float, ...], FloatArray]()
        self._use(slots)

    def _use(self, slots: Slots) -> None:
        self._slots = slots
        self._rows = self._reach_rows()
        kind = self._kind_of_device[list(slots.devices)]
        self._loads = Loads(self._table, kind, slots.may_skip)
        self._sources = self._links()
        self._sending_s = self._sends()
        self._senders = _senders(self._sources, self._sending_s, self._line.n_units)
        self._unlimited: list[_Bracket] = []
        """Bounds on loads that are almost the smallest one without regard to memory, once known.
        Shared with solvers for other memory."""

    def with_memory(self, memory_bytes: Sequence[int]) -> "StageSolver":
        """Return a solver for slots with other memory; it shares what does not depend on that."""
        solver = copy(self)
        solver._slots = replace(self._slots, memory_bytes=memory_bytes)
        solver._rows = solver._reach_rows()
        return solver

    def with_slots(self, slots: Slots) -> "StageSolver":
        """Return a solver for other slots; it shares what is known of devices and links."""
        solver = copy(self)
        solver._use(slots)
        return solver

    def _reach_rows(self) -> IntArray:
        """Return the row of `ReachTable` of each slot."""
        slots = self._slots
        flights = slots.flights or [ONE] * len(slots.memory_bytes)
        kinds = list(zip(slots.memory_bytes, flights, strict=True))
        return np.array(self._reaches.rows_of(kinds), dtype=np.int64)

    def _reach(self, slot: int) -> Reach:
        """Return what is known of stages that fit a slot."""
        return reach_in(self._reaches.reaches, self._rows[slot])

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

    def least_load(
        self, at_most_s: float = np.inf, precision: float = EQUAL_LOADS
    ) -> list[Stretch] | None:
        """Return the stages with the smallest largest load, or None if memory allows no cut.

        Loads up to about `precision` above the smallest, relatively, are ties. Ties go to fewer
        stages (`Slots.prefer_more`: to more), then to the most even ones
        (`fxpart.placement.stages.even_cuts`). None too if the load exceeds `at_most_s`, which is
        found out in O(U) per slot.
        """
        if at_most_s < np.inf and self._cuts(at_most_s) is None:
            return None
        if self._sending_s is not None:
            carried_s = [float(self._sending_s.max())]
        else:
            carried_s = [float(link_s.max()) for groups in self._sources for _, link_s in groups]
        most_s = min(max(float(self._table.max()), *carried_s, 0.0), at_most_s)
        if not self._unlimited:
            whole = _Bracket(0.0, most_s)
            self._unlimited.append(
                whole.narrowed(
                    lambda bound_s: self._cuts(bound_s, with_memory=False) is not None, _ROUGH
                )
            )
        feasible = self._feasible(self._unlimited[0], most_s)
        if feasible is None:
            return None
        allowed = feasible.narrowed(lambda bound_s: self._cuts(bound_s) is not None, precision)
        return self._choose(allowed.high_s * (1 + EQUAL_LOADS))

    def stage_bytes(self, begin: int, end: int) -> StretchBytes:
        """Return the bytes of units `begin` to `end` - 1 (not empty) for one microbatch."""
        cuts = self._line.cuts
        return self._line.stretches.bytes_of(int(cuts[begin]), int(cuts[end]))

    def peak_bytes(self, begin: int, end: int, slot: int = 0) -> int:
        """Return the memory needed for units `begin` to `end` - 1 on a slot."""
        if begin == end:
            return 0
        return int(needed_bytes(self.stage_bytes(begin, end), self._reach(slot).flight))

    def fits(self, stage: Stretch) -> bool:
        """Return whether a stage fits its device, which must have one slot."""
        slot = self._slots.devices.index(stage.device)
        return self.peak_bytes(stage.begin, stage.end, slot) <= self._slots.memory_bytes[slot]

    def forbid(self, stage: Stretch) -> None:
        """Forbid stages with the same begin and the same or a later end, on such a slot."""
        reach = self._reach(self._slots.devices.index(stage.device))
        reach.fits[stage.begin] = min(int(reach.fits[stage.begin]), stage.end - 1)
        reach.fails[stage.begin] = min(int(reach.fails[stage.begin]), stage.end)

    def furthest(self, begin: int, slot: int = 0) -> int:
        """Return the furthest end of a stage from `begin` on a slot."""
        reach, count = self._reach(slot), self._line.n_units
        targets = np.full(count + 1, count, dtype=np.int64)
        stretches = self._line.stretches
        with stretches.lock:
            stretches.make_room()
            settle(*stretches.tables, self._line.cuts, np.array([begin]), targets, reach)
        return int(reach.fits[begin])

    def reaches_end(self) -> bool:
        """Return whether stages, each as long as memory allows, reach the end, slot by slot.

        Without a backward, False means almost always that no cut fits; with one, that none was
        found: a longer stage may need less memory.
        """
        end = 0
        for slot in range(len(self._slots.devices)):
            end = self.furthest(end, slot)
            if end == self._line.n_units:
                return True
        return False

    def _feasible(self, unlimited: _Bracket, most_s: float) -> _Bracket | None:
        """Return bounds around the smallest one with a cut that fits; None if there is none.

        `unlimited` are those without regard to memory.
        """
        has_backward = self._line.first_backward < len(self._line.unit_of)
        if has_backward and not self._may_fit():
            return None
        low_s, start_s = unlimited
        if self._cuts(start_s) is not None:
            return unlimited
        # If not even the largest bound allows a cut, which takes long to find out, memory allows
        # none; with a backward, nearly always.
        if not self.reaches_end() and self._cuts(most_s) is None:
            return None
        high_s, step = start_s, 1e-3
        while high_s < most_s:
            low_s, high_s = high_s, min(most_s, start_s + step * most_s)
            if self._cuts(high_s) is not None:
                return _Bracket(low_s, high_s)
            step *= 1.5
        return None

    def _may_fit(self) -> bool:
        """Return whether stages as long as memory allows reach the end, with a margin."""
        if self.reaches_end():
            return True
        more_bytes = [int(_MARGIN * size_bytes) for size_bytes in self._slots.memory_bytes]
        return self.with_memory(more_bytes).reaches_end()

    def _cuts(self, bound_s: float, *, with_memory: bool = True) -> list[IntArray] | None:
        """Return the furthest end of a stage on each slot from each cut, or None if infeasible.

        Values are meaningful only where a stage can begin in a cut of the whole row.
        """
        stretches, rows = self._line.stretches, self._rows if with_memory else self._rows[:0]
        with stretches.lock:
            stretches.make_room()
            furthest = furthest_ends(
                self._loads,
                self._senders,
                self._reaches.reaches,
                rows,
                *stretches.tables,
                self._line.cuts,
                bound_s,
            )
        return list(furthest) or None

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


def _senders(
    sources: Sequence[Sequence[tuple[list[int], FloatArray]]],
    sending_s: FloatArray | None,
    n_units: int,
) -> Senders:
    """Return the slots from which each slot may receive, as tables."""
    groups = [group for groups in sources for group in groups]
    # The times of a kind of link are one array.
    link_s = {id(times_s): times_s for _, times_s in groups}
    row_of = {identity: row for row, identity in enumerate(link_s)}
    start, link = csr([[row_of[id(times_s)] for _, times_s in groups] for groups in sources])
    return Senders(
        start,
        link,
        *csr([members for members, _ in groups]),
        np.array([*link_s.values()]).reshape(-1, n_units + 1),
        np.empty((0, 0)) if sending_s is None else sending_s,
    )
