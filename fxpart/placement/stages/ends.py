"""Where stages may end if none has a load above a bound, slot by slot. Loops of `StageSolver`."""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.tables import MemoryTables
from fxpart.placement.stages.even_cuts import BoolArray
from fxpart.placement.stages.reach import Reaches, reach_in, settle
from fxpart.placement.stages.stretch_bytes import KnownBytes, StretchScratch, UnitTables
from fxpart.support.compiled import compiled

__all__ = ["Loads", "Senders", "furthest_ends"]


class Loads(NamedTuple):
    """The compute times of a row of units on S slots."""

    before_s: FloatArray
    """Time of all units before each cut, by kind of device. Shape (K, U + 1)."""
    kind: IntArray
    """Kind of the device of each slot. Length S."""
    may_skip: bool
    """Whether slots may stay empty."""


class Senders(NamedTuple):
    """The slots from which each slot may receive, in groups of equal links."""

    start: IntArray
    """CSR starts of slots into groups. Length S + 1."""
    link: IntArray
    """The row of `link_s` of each group. Length G."""
    member_start: IntArray
    """CSR starts of groups into `members`. Length G + 1."""
    members: IntArray
    """Slots."""
    link_s: FloatArray
    """Time of a link by cut, as of `StageLine.link_s`. Shape (L, U + 1)."""
    sending_s: FloatArray
    """Sending time of each possible stage, which then counts instead. Shape (U + 1, U + 1), or (0,
    0)."""


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


@compiled
def _within(loads: Loads, bound_s: float) -> IntArray:
    """Return `_load_limits` by kind of device. Shape (K, U + 1)."""
    kinds, count = loads.before_s.shape
    limits = np.empty((kinds, count), dtype=np.int64)
    for kind in range(kinds):
        limits[kind] = _load_limits(loads.before_s[kind], bound_s)
    return limits


@compiled
def _ends_of_rest(loads: Loads, senders: Senders, limits: IntArray, bound_s: float) -> BoolArray:
    """Return for each slot, and after the last, the cuts from which the rest may be feasible.

    Only loads, and the fastest link of each slot to an earlier one, are considered. Shape (S + 1,
    U + 1).
    """
    slots, count = loads.kind.shape[0], limits.shape[1]
    rest = np.zeros((slots + 1, count), dtype=np.bool_)
    rest[slots, count - 1] = True
    for slot in range(slots - 1, -1, -1):
        ends = _behind(rest[slot + 1], limits[loads.kind[slot]])
        first, last = senders.start[slot], senders.start[slot + 1]
        if first < last and not senders.sending_s.shape[0]:
            for cut in range(count):
                may_receive = False
                for group in range(first, last):
                    may_receive |= senders.link_s[senders.link[group], cut] <= bound_s
                ends[cut] &= may_receive
        rest[slot] = ends | rest[slot + 1] if loads.may_skip else ends
    return rest


@compiled
def _begins(  # noqa: PLR0917 - compiled code takes no keywords
    slot: int,
    may_skip: bool,
    senders: Senders,
    ends: BoolArray,
    any_end: BoolArray,
    bound_s: float,
) -> BoolArray:
    """Return the possible begins of a stage on `slot`, given the `ends` of earlier stages."""
    begins = np.zeros(any_end.shape[0], dtype=np.bool_)
    if senders.sending_s.shape[0] and slot:
        begins |= any_end if may_skip else ends[slot - 1]
    else:
        for group in range(senders.start[slot], senders.start[slot + 1]):
            first, last = senders.member_start[group], senders.member_start[group + 1]
            # Usually all links are equal.
            joined = any_end.copy()
            if last - first < slot:
                joined[:] = False
                for member in senders.members[first:last]:
                    joined |= ends[member]
            begins |= joined & (senders.link_s[senders.link[group]] <= bound_s)
    begins[0] |= may_skip or slot == 0
    return begins


@compiled
def furthest_ends(  # noqa: PLR0917 - compiled code takes no keywords
    loads: Loads,
    senders: Senders,
    reaches: Reaches,
    rows: IntArray,
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    known: KnownBytes,
    cuts: IntArray,
    bound_s: float,
) -> IntArray:
    """Return the furthest end of a stage on each slot from each cut; no rows if infeasible.

    Values are meaningful only where a stage can begin in a cut of the whole row. Shape (S, U + 1).

    Args:
        loads: compute times.
        senders: transfers.
        reaches: what is known of stretches that fit.
        rows: the row of `reaches` of each slot; none to ignore memory.
        m: the memory of the graph.
        units: its finest row of units.
        scratch: scratch arrays.
        known: known stretches of the finest row.
        cuts: the cuts of this row, in the finest one. Length U + 1.
        bound_s: largest load of a stage.

    """
    limits = _within(loads, bound_s)
    rest = _ends_of_rest(loads, senders, limits, bound_s)
    slots, count = loads.kind.shape[0], limits.shape[1]
    furthest = np.empty((slots if rest[0, 0] else 0, count), dtype=np.int64)
    ends, any_end = np.zeros((slots, count), dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    for slot in range(furthest.shape[0]):
        limit = limits[loads.kind[slot]]
        useful = _begins(slot, loads.may_skip, senders, ends, any_end, bound_s)
        # Memory does not matter where only an empty slot leads on.
        useful &= _behind(rest[slot + 1], limit)
        furthest[slot] = limit
        if rows.shape[0]:
            reach = reach_in(reaches, rows[slot])
            settle(m, units, scratch, known, cuts, np.flatnonzero(useful), limit, reach)
            furthest[slot] = np.minimum(limit, reach.fits)
        furthest[slot] = np.where(useful, furthest[slot], np.arange(count))
        if senders.sending_s.shape[0]:
            ends[slot] = _ahead_within(useful, furthest[slot], senders.sending_s, bound_s)
        else:
            ends[slot] = _ahead(useful, furthest[slot])
        any_end |= ends[slot]
    reached = slots > 0 and (any_end if loads.may_skip else ends[slots - 1])[-1]
    return furthest if reached else furthest[:0]
