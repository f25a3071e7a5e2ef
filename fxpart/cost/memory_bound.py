"""A latency that no placement beats: what must be split since it fits no device pays for that.

Along the longest path lie operators that all work around them passes through. Between two of these,
either all that has weights runs on one device, or something is sent on its way. What runs on one
device without a break must fit it, so that a model larger than a device is sent on somewhere, and
what fits no fast device runs on a slow one. O(n) and the square of the number of sections.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = ["memory_bound_s"]

BoolArray = npt.NDArray[np.bool_]

_LONGEST = 96
"""Operators of the path that a detour may pass by; longer ones, such as values that the backward
alone reads, are left out of account: the bound holds without them."""


class _Sections(NamedTuple):
    """A row of operators, and what lies between each and the one before it. G gates, n operators.

    A section is at home if all in it that has weights, or makes results that stay, is on the device
    of the gate before, as is its gate.
    """

    gate: IntArray
    """The row: each reads, at some remove, from the one before. Length G."""
    section: IntArray
    """For each operator the gate that it has to be done for and comes after the gate before;
    -1 for those left out of account. Length n."""
    through_s: FloatArray
    """The least time from gate to gate if an operator between them is on another device than both.
    Length n."""
    least_s: FloatArray
    """The least time from gate to gate. Length G."""
    apart_s: FloatArray
    """The least time from gate to gate if the section is not at home. Length G."""


class _Edges(NamedTuple):
    """What each operator comes after: those that it reads from, then the one before in its group.

    Of operator i from ``start[i]`` to ``start[i + 1]``.
    """

    start: IntArray
    maker: IntArray
    value: IntArray
    """Which is read; -1 for the one before in the group."""


@compiled
def _edges(t: CostTables, before: IntArray) -> _Edges:
    """Return the edges of the graph; inputs of the model have none."""
    n = before.shape[0]
    start = np.zeros(n + 1, dtype=np.int64)
    maker, value = np.empty(t.reads.shape[0] + n, dtype=np.int64), np.full(t.reads.shape[0] + n, -1)
    count = 0
    for op in range(n):
        for i in range(t.read_start[op], t.read_start[op + 1]):
            if t.producer[t.reads[i]] >= 0:
                maker[count], value[count] = t.producer[t.reads[i]], t.reads[i]
                count += 1
        if before[op] >= 0:
            maker[count] = before[op]
            count += 1
        start[op + 1] = count
    return _Edges(start, maker[:count], value[:count])


@compiled
def _longest_path(edges: _Edges, time_s: FloatArray) -> IntArray:
    """Return the operators of the longest path, in order; those of a group follow each other."""
    n = time_s.shape[0]
    finish_s, via = np.zeros(n), np.full(n, -1)
    last = 0
    for op in range(n):
        start_s = 0.0
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if finish_s[maker] >= start_s:
                start_s, via[op] = finish_s[maker], maker
        finish_s[op] = start_s + time_s[op]
        if finish_s[op] >= finish_s[last]:
            last = op
    count, op = 0, last
    while op >= 0:
        count, op = count + 1, via[op]
    path, op = np.empty(count, dtype=np.int64), last
    for k in range(count):
        path[count - 1 - k], op = op, via[op]
    return path


@compiled
def _gates(  # noqa: PLR0912 - a few loops, compiled whole
    edges: _Edges, path: IntArray, n: int
) -> tuple[IntArray, IntArray]:
    """Return `_Sections.gate` and `section`: the operators of `path` that no detour passes by."""
    count = path.shape[0]
    place = np.full(n, -1)
    for k in range(count):
        place[path[k]] = k
    # The last of the path before each operator, and the first after it.
    since, until = place.copy(), np.full(n, count)
    for op in range(n):
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if place[op] < 0:
                since[op] = max(since[op], since[maker])
    for op in range(n - 1, -1, -1):
        if place[op] >= 0:
            until[op] = place[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            until[maker] = min(until[maker], until[op])
    passed = np.zeros(count + 1, dtype=np.int64)
    counts = (since >= 0) & (until < count) & (until - since <= _LONGEST)
    for op in range(n):
        if counts[op] and until[op] - since[op] > 1:
            passed[since[op] + 1] += 1
            passed[until[op]] -= 1
    # What one of the path reads from an earlier one passes by those between, such as a residual.
    for op in path:
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, is_read = edges.maker[i], edges.value[i] >= 0
            if is_read and place[maker] >= 0 and 1 < place[op] - place[maker] <= _LONGEST:
                passed[place[maker] + 1] += 1
                passed[place[op]] -= 1
    is_gate = np.cumsum(passed)[:count] == 0
    # A gate ends the section of its own number.
    number = np.cumsum(is_gate) - is_gate
    section = np.full(n, -1)
    for op in range(n):
        if counts[op]:
            section[op] = number[until[op]]
    return path[is_gate], section


@compiled
def _sections(
    edges: _Edges,
    group: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    is_heavy: BoolArray,
) -> _Sections:
    """Return the sections along the longest path, with what is between their gates for certain.

    `is_heavy` says whether an operator takes memory that stays. Times run from the end of the gate
    before: until an operator ends (head), and from there to the end of its gate (tail). On another
    device than the gate before, an operator ends no earlier than `away`: of each operator that it
    reads from, either the result is sent, or that one was away itself; likewise for its gate.
    """
    n = time_s.shape[0]
    gate, section = _gates(edges, _longest_path(edges, time_s), n)
    head_s, tail_s = np.full(n, -np.inf), np.full(n, -np.inf)
    for op in range(n):
        here = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if here >= 1 and maker == gate[here - 1]:
                head_s[op] = max(head_s[op], time_s[op])
            elif here >= 1 and section[maker] == here:
                head_s[op] = max(head_s[op], head_s[maker] + time_s[op])
    tail_s[gate] = 0.0
    for op in range(n - 1, -1, -1):
        if section[op] >= 1 and (head_s[op] < 0.0 or tail_s[op] < 0.0):
            section[op] = -1
        here = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if here >= 1 and section[maker] == here:
                tail_s[maker] = max(tail_s[maker], time_s[op] + tail_s[op])
    return _costs(edges, group, time_s, cheapest_s, is_heavy, gate, section, head_s, tail_s)


@inlined
def _costs(  # noqa: PLR0917 - compiled loops take arrays by position
    edges: _Edges,
    group: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    is_heavy: BoolArray,
    gate: IntArray,
    section: IntArray,
    head_s: FloatArray,
    tail_s: FloatArray,
) -> _Sections:
    """Return the sections with their costs; see `_sections`."""
    n, count = time_s.shape[0], gate.shape[0]
    away_s, from_away_s = np.zeros(n), np.zeros(n)
    least_s, apart_s = np.zeros(count), np.full(count, np.inf)
    for op in range(n):
        here = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, value = edges.maker[i], edges.value[i]
            is_gate = here >= 1 and maker == gate[here - 1]
            if here < 1 or not (is_gate or section[maker] == here):
                continue
            sent_s = np.inf
            if value >= 0 and group[maker] != group[op]:
                sent_s = (0.0 if is_gate else head_s[maker]) + cheapest_s[value] + time_s[op]
            near_s = np.inf if is_gate else away_s[maker] + time_s[op]
            away_s[op] = max(away_s[op], min(sent_s, near_s))
    from_away_s[gate] = np.inf
    for op in range(n - 1, -1, -1):
        here = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, value = edges.maker[i], edges.value[i]
            if here < 1 or section[maker] != here:
                continue
            sent_s = np.inf
            if value >= 0 and group[maker] != group[op]:
                sent_s = cheapest_s[value] + time_s[op] + tail_s[op]
            from_away_s[maker] = max(from_away_s[maker], min(sent_s, time_s[op] + from_away_s[op]))
    for op in range(n):
        here = section[op]
        if here >= 1 and op == gate[here]:
            apart_s[here] = min(apart_s[here], away_s[op])
        elif here >= 1 and is_heavy[op]:
            apart_s[here] = min(apart_s[here], away_s[op] + from_away_s[op])
    for k in range(1, count):
        least_s[k] = head_s[gate[k]]
        apart_s[k] = max(apart_s[k], least_s[k])
    return _Sections(gate, section, away_s + from_away_s, least_s, apart_s)


@inlined
def _change_bytes(m: MemoryTables, op: int, sign: int, times_used: IntArray) -> int:
    """Return the bytes by which a device holds more with `op`, or, with `sign` -1, without it."""
    change = 0
    for j in range(m.use_start[op], m.use_start[op + 1]):
        weight = m.uses[j]
        if times_used[weight] == (0 if sign > 0 else 1):
            change += sign * m.weight_bytes[weight]
        times_used[weight] += sign
    for value in range(m.made_start[op], m.made_start[op + 1]):
        if m.is_output[value] and m.base[value] < 0:
            change += sign * m.alloc_bytes[value]
    return change


@compiled
def _first_that_fit(
    m: MemoryTables, starts: IntArray, by_section: IntArray, memory_bytes: int
) -> IntArray:
    """Return for each section the first that fits on one device with it and those between.

    With the gate before that first one, too. It is the section's own number plus one where it does
    not fit itself. Counted are weights, each once, and results that stay: less than the peak.
    """
    count = starts.shape[0] - 1
    times_used = np.zeros(m.weight_bytes.shape[0], dtype=np.int64)
    first = np.zeros(count, dtype=np.int64)
    # A section's gate comes last in it, so that what is held is always a stretch of `by_section`.
    held_bytes, low = _change_bytes(m, by_section[0], 1, times_used), 1
    for k in range(1, count):
        for i in range(starts[k], starts[k + 1]):
            held_bytes += _change_bytes(m, by_section[i], 1, times_used)
        while held_bytes > memory_bytes and low <= k:
            for i in range(starts[low] - 1, starts[low + 1] - 1):
                held_bytes += _change_bytes(m, by_section[i], -1, times_used)
            low += 1
        first[k] = low
    return first


@compiled
def _shortest(
    begin_s: float, apart_s: FloatArray, together_s: FloatArray, first: IntArray
) -> float:
    """Return the least time to the last gate, with runs of sections that fit on one device.

    `together_s`, of shape (kinds of devices, G + 1), has the time of all sections before each;
    `first`, of shape (kinds, G), is what `_first_that_fit` returns.
    """
    count = apart_s.shape[0]
    # At the end of each gate: at all, and where the section before it was not on one device.
    done_s, broken_s = np.empty(count), np.empty(count)
    done_s[0] = broken_s[0] = begin_s
    for k in range(1, count):
        broken_s[k] = done_s[k - 1] + apart_s[k]
        done_s[k] = broken_s[k]
        for kind in range(together_s.shape[0]):
            for j in range(first[kind, k] - 1, k):
                run_s = together_s[kind, k + 1] - together_s[kind, j + 1]
                done_s[k] = min(done_s[k], broken_s[j] + run_s)
    return float(done_s[count - 1])


def memory_bound_s(
    problem: Problem, before: IntArray, time_s: FloatArray, cheapest_s: FloatArray
) -> float:
    """Return a latency in seconds that no placement beats that fits the devices' memory.

    Args:
        problem: a graph on several devices.
        before: for each operator the one of its group right before it, or -1.
        time_s: of each operator on its fastest device.
        cheapest_s: of a transfer of each value on the fastest link.

    """
    t, m = problem.costs, problem.memory
    heavy = _heavy(m)
    sections = _sections(_edges(t, before), problem.graph.group, time_s, cheapest_s, heavy)
    section, count = sections.section, len(sections.gate)
    inside = np.flatnonzero(section >= 0)
    by_section = inside[np.argsort(section[inside], kind="stable")]
    starts = np.searchsorted(section[by_section], np.arange(count + 1)).astype(np.int64)
    kinds = {
        (int(room), t.op_time_s[:, device].tobytes()): device
        for device, room in enumerate(problem.topology.memory_bytes.tolist())
    }
    together_s = np.zeros((len(kinds), count + 1))
    first = np.empty((len(kinds), count), dtype=np.int64)
    for row, ((room, _), device) in enumerate(kinds.items()):
        times = t.op_time_s[by_section, device]
        whole_s = np.bincount(section[by_section], times, minlength=count)
        # What has weights takes turns at home; so does what takes longer elsewhere than all do so.
        stays = sections.through_s[by_section] >= whole_s[section[by_section]]
        stays |= heavy[by_section]
        turns_s = np.bincount(section[by_section], times * stays, minlength=count)
        np.cumsum(np.maximum(turns_s, sections.least_s), out=together_s[row, 1:])
        first[row] = _first_that_fit(m, starts, by_section, room)
    begin_s = float(time_s[sections.gate[0]])
    return float(_shortest(begin_s, sections.apart_s, together_s, first))


def _heavy(m: MemoryTables) -> BoolArray:
    """Return whether an operator uses weights, or makes a result that stays. Length n."""
    heavy: BoolArray = np.diff(m.use_start) > 0
    heavy[m.producer[m.is_output & (m.producer >= 0)]] = True
    return heavy
