"""A lower bound of the latency from memory: a model that fits no single device must pay for cuts.

Some operators of the longest path are gates: all work around them passes through them. Between two
consecutive gates, either everything with weights runs on one device, or a transfer is on the way. A
run of sections on one device must fit its memory, so a model larger than a device needs a transfer
somewhere, and one that does not fit a fast device runs on a slow one. O(n), plus the square of the
number of sections.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = ["Edges", "Sections", "memory_bound_s", "sections_along"]

BoolArray = npt.NDArray[np.bool_]

_LONGEST = 96
"""Longest detour that is considered, in operators of the path that it bypasses. Ignoring longer
ones, such as activations read by the backward, keeps the bound valid."""


class Sections(NamedTuple):
    """A chain of G gates, and the sections between consecutive ones, for n operators.

    A section is at home if its gate and all its operators that have weights, or results that are
    never freed, are on the device of the previous gate.
    """

    gate: IntArray
    """The gates; each is a descendant of the previous one. Length G."""
    section: IntArray
    """The gate that depends on each operator, which itself depends on the previous gate; -1 for
    ignored operators. Length n."""
    through_s: FloatArray
    """Lower bound of the time from gate to gate if this operator is on another device than both.
    Length n."""
    least_s: FloatArray
    """Lower bound of the time from gate to gate. Length G."""
    apart_s: FloatArray
    """Lower bound of the time from gate to gate if the section is not at home. Length G."""


class Edges(NamedTuple):
    """Predecessors of each operator: producers of its reads, then the previous one of its group.

    Those of operator i are from ``start[i]`` to ``start[i + 1]``.
    """

    start: IntArray
    maker: IntArray
    value: IntArray
    """The value that is read; -1 for the predecessor in the group."""


@compiled
def _edges(t: CostTables, before: IntArray) -> Edges:
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
    return Edges(start, maker[:count], value[:count])


@compiled
def _longest_path(edges: Edges, time_s: FloatArray) -> IntArray:
    """Return the operators of the longest path, in order; groups run sequentially."""
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
    edges: Edges, path: IntArray, n: int
) -> tuple[IntArray, IntArray]:
    """Return `Sections.gate` and `section`; no detour bypasses a gate."""
    count = path.shape[0]
    place = np.full(n, -1)
    for k in range(count):
        place[path[k]] = k
    # The last operator of the path before each operator, and the first after it.
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
    # An edge between operators of the path, such as a residual connection, bypasses those between.
    for op in path:
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, is_read = edges.maker[i], edges.value[i] >= 0
            if is_read and place[maker] >= 0 and 1 < place[op] - place[maker] <= _LONGEST:
                passed[place[maker] + 1] += 1
                passed[place[op]] -= 1
    is_gate = np.cumsum(passed)[:count] == 0
    # A gate ends the section with the same index.
    number = np.cumsum(is_gate) - is_gate
    section = np.full(n, -1)
    for op in range(n):
        if counts[op]:
            section[op] = number[until[op]]
    return path[is_gate], section


@compiled
def _sections(
    edges: Edges,
    group: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    is_heavy: BoolArray,
) -> Sections:
    """Return the sections along the longest path with their bounds.

    `is_heavy` marks operators that take memory permanently. Times are relative to the end of the
    previous gate: until an operator ends (head), and from there to the end of its gate (tail). On
    another device than the previous gate an operator ends no earlier than `away`: each operand is
    either sent, or its producer is away itself; likewise towards its own gate.
    """
    n = time_s.shape[0]
    gate, section = _gates(edges, _longest_path(edges, time_s), n)
    head_s, tail_s = np.full(n, -np.inf), np.full(n, -np.inf)
    for op in range(n):
        current = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if current >= 1 and maker == gate[current - 1]:
                head_s[op] = max(head_s[op], time_s[op])
            elif current >= 1 and section[maker] == current:
                head_s[op] = max(head_s[op], head_s[maker] + time_s[op])
    tail_s[gate] = 0.0
    for op in range(n - 1, -1, -1):
        if section[op] >= 1 and (head_s[op] < 0.0 or tail_s[op] < 0.0):
            section[op] = -1
        current = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker = edges.maker[i]
            if current >= 1 and section[maker] == current:
                tail_s[maker] = max(tail_s[maker], time_s[op] + tail_s[op])
    return _costs(edges, group, time_s, cheapest_s, is_heavy, gate, section, head_s, tail_s)


@inlined
def _costs(  # noqa: PLR0917 - compiled loops take arrays by position
    edges: Edges,
    group: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    is_heavy: BoolArray,
    gate: IntArray,
    section: IntArray,
    head_s: FloatArray,
    tail_s: FloatArray,
) -> Sections:
    """Return the sections with their costs; see `_sections`."""
    n, count = time_s.shape[0], gate.shape[0]
    away_s, from_away_s = np.zeros(n), np.zeros(n)
    least_s, apart_s = np.zeros(count), np.full(count, np.inf)
    for op in range(n):
        current = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, value = edges.maker[i], edges.value[i]
            is_gate = current >= 1 and maker == gate[current - 1]
            if current < 1 or not (is_gate or section[maker] == current):
                continue
            sent_s = np.inf
            if value >= 0 and group[maker] != group[op]:
                sent_s = (0.0 if is_gate else head_s[maker]) + cheapest_s[value] + time_s[op]
            near_s = np.inf if is_gate else away_s[maker] + time_s[op]
            away_s[op] = max(away_s[op], min(sent_s, near_s))
    from_away_s[gate] = np.inf
    for op in range(n - 1, -1, -1):
        current = section[op]
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, value = edges.maker[i], edges.value[i]
            if current < 1 or section[maker] != current:
                continue
            sent_s = np.inf
            if value >= 0 and group[maker] != group[op]:
                sent_s = cheapest_s[value] + time_s[op] + tail_s[op]
            from_away_s[maker] = max(from_away_s[maker], min(sent_s, time_s[op] + from_away_s[op]))
    for op in range(n):
        current = section[op]
        if current >= 1 and op == gate[current]:
            apart_s[current] = min(apart_s[current], away_s[op])
        elif current >= 1 and is_heavy[op]:
            apart_s[current] = min(apart_s[current], away_s[op] + from_away_s[op])
    for k in range(1, count):
        least_s[k] = head_s[gate[k]]
        apart_s[k] = max(apart_s[k], least_s[k])
    return Sections(gate, section, away_s + from_away_s, least_s, apart_s)


@inlined
def _change_bytes(m: MemoryTables, op: int, sign: int, times_used: IntArray) -> int:
    """Return the change in a device's bytes from adding `op`, or removing it if `sign` is -1."""
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
    """Return the first section of the longest run ending at each section that fits on one device.

    The run includes the gate before its first section. The result is the section's index plus one
    if it does not fit by itself. Only distinct weights and never-freed results are counted, which
    is a lower bound of the peak.
    """
    count = starts.shape[0] - 1
    times_used = np.zeros(m.weight_bytes.shape[0], dtype=np.int64)
    first = np.zeros(count, dtype=np.int64)
    # A section's gate is its last operator, so a run is always a slice of `by_section`.
    run_bytes, low = _change_bytes(m, by_section[0], 1, times_used), 1
    for k in range(1, count):
        for i in range(starts[k], starts[k + 1]):
            run_bytes += _change_bytes(m, by_section[i], 1, times_used)
        while run_bytes > memory_bytes and low <= k:
            for i in range(starts[low] - 1, starts[low + 1] - 1):
                run_bytes += _change_bytes(m, by_section[i], -1, times_used)
            low += 1
        first[k] = low
    return first


@compiled
def _shortest(
    begin_s: float, apart_s: FloatArray, together_s: FloatArray, first: IntArray
) -> float:
    """Return the least time to the last gate over all divisions into runs that fit on one device.

    `together_s`, of shape (kinds of devices, G + 1), has the cumulative time of sections; `first`,
    of shape (kinds, G), is the result of `_first_that_fit`.
    """
    count = apart_s.shape[0]
    # Least end of each gate: in any case, and if the section before it was not on one device.
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


def sections_along(
    problem: Problem, before: IntArray, time_s: FloatArray, cheapest_s: FloatArray
) -> tuple[Edges, Sections]:
    """Return the predecessors of each operator, and the sections along the longest path.

    Args:
        problem: a graph on several devices.
        before: predecessor of each operator in its group, or -1.
        time_s: time of each operator on its fastest device.
        cheapest_s: time to transfer each value over the fastest link.

    """
    edges = _edges(problem.costs, before)
    heavy = _heavy(problem.memory)
    return edges, _sections(edges, problem.graph.group, time_s, cheapest_s, heavy)


def memory_bound_s(problem: Problem, sections: Sections, time_s: FloatArray) -> float:
    """Return a lower bound in seconds of the latency of placements that fit in memory.

    Args:
        problem: a graph on several devices.
        sections: those along the longest path.
        time_s: time of each operator on its fastest device.

    """
    t, m = problem.costs, problem.memory
    heavy = _heavy(m)
    section, count = sections.section, len(sections.gate)
    inside = np.flatnonzero(section >= 0)
    by_section = inside[np.argsort(section[inside], kind="stable")]
    starts = np.searchsorted(section[by_section], np.arange(count + 1)).astype(np.int64)
    kinds = {
        (int(memory_bytes), t.op_time_s[:, device].tobytes()): device
        for device, memory_bytes in enumerate(problem.topology.memory_bytes.tolist())
    }
    together_s = np.zeros((len(kinds), count + 1))
    first = np.empty((len(kinds), count), dtype=np.int64)
    for row, ((memory_bytes, _), device) in enumerate(kinds.items()):
        times = t.op_time_s[by_section, device]
        whole_s = np.bincount(section[by_section], times, minlength=count)
        # Operators with weights run one at a time at home, as do those that would take longer
        # elsewhere than the whole section takes at home.
        runs_at_home = sections.through_s[by_section] >= whole_s[section[by_section]]
        runs_at_home |= heavy[by_section]
        home_s = np.bincount(section[by_section], times * runs_at_home, minlength=count)
        np.cumsum(np.maximum(home_s, sections.least_s), out=together_s[row, 1:])
        first[row] = _first_that_fit(m, starts, by_section, memory_bytes)
    begin_s = float(time_s[sections.gate[0]])
    return float(_shortest(begin_s, sections.apart_s, together_s, first))


def _heavy(m: MemoryTables) -> BoolArray:
    """Return whether each operator uses weights or has a result that is never freed. Length n."""
    heavy: BoolArray = np.diff(m.use_start) > 0
    heavy[m.producer[m.is_output & (m.producer >= 0)]] = True
    return heavy
