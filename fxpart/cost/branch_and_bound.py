"""Minimize latency or largest load over all placements that fit, by best-first branch and bound.

Units are placed one at a time in graph order. The cost of a partial placement is bounded by a
simulation in which each unplaced unit runs on all devices with enough memory at once, as early as
its operands can arrive, and by the total work of all devices. Its memory is bounded by the peak of
the placed units plus the resident bytes of the rest. Among identical idle devices only the first is
tried. After Land and Doig: An automatic method of solving discrete programming problems.
Econometrica 28(3), 1960, doi:10.2307/1910129.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.kernels import peak_on_device
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = ["Branching", "least_of_all"]

_ROUNDING = 1e-12


class Branching(NamedTuple):
    """A problem laid out for branching: n operators, U units, D devices, V values."""

    costs: CostTables
    possible_s: FloatArray
    """Operator times, infinite on devices where they do not fit. Shape (n, D)."""
    memory: MemoryTables
    room: IntArray
    """Memory of each device. Shape (D,)."""
    kind: IntArray
    """Class of interchangeable devices of each device. Shape (D,)."""
    unit_of: IntArray
    """The unit of each operator; units are ordered by their first operator. Shape (n,)."""
    first_op: IntArray
    """The first operator of each unit, then n. Shape (U + 1,)."""
    unit_s: FloatArray
    """Unit times, infinite on devices where they do not fit. Shape (U, D)."""
    stays_bytes: IntArray
    """Resident bytes of each unit that no earlier unit uses. Shape (U,)."""
    share: FloatArray
    """Share of the total work of each device in the duality bound; all 0 for no bound. Shape
    (D,)."""


@inlined
def _least_bytes(m: MemoryTables, device_of: IntArray) -> MemoryTables:
    """Return the tables with lower bounds for values of unplaced producers where they are read.

    Such a value may turn out to be produced on that device, or be a view of another.
    """
    value_bytes = m.value_bytes.copy()
    for value in range(value_bytes.shape[0]):
        maker = m.producer[value]
        if maker >= 0 and device_of[maker] < 0:
            is_view = m.base[value] >= 0
            value_bytes[value] = 0 if is_view else min(value_bytes[value], m.alloc_bytes[value])
    return MemoryTables(
        m.read_start,
        m.reads,
        m.producer,
        m.made_start,
        m.reader_start,
        m.readers,
        value_bytes,
        m.alloc_bytes,
        m.base,
        m.is_output,
        m.held,
        m.use_start,
        m.uses,
        m.weight_bytes,
    )


@compiled
def _free_bytes(b: Branching, device_of: IntArray, change: IntArray, free: IntArray) -> bool:
    """Fill `free` (D,) with upper bounds of free memory; return whether none is negative.

    Unplaced operators have device -1.
    """
    lower_tables = _least_bytes(b.memory, device_of)
    for device in range(b.room.shape[0]):
        free[device] = b.room[device] - peak_on_device(lower_tables, device_of, device, change)
    return bool(free.min() >= 0)


@compiled
def _together_s(b: Branching, placed: int, free: IntArray, begun_s: FloatArray) -> float:
    """Return a bound from the work of all devices after `begun_s`; infinite if memory is short.

    With shares that sum to 1, the weighted sum of the work on placed and unplaced units is at most
    the latest end. `begun_s` (D,) is when each device is done so far, `free` (D,) has upper bounds
    of free memory.
    """
    units, devices = b.unit_s.shape
    if free.sum() < b.stays_bytes[placed:].sum():
        return np.inf
    together_s = (b.share * begun_s).sum()
    for unit in range(placed, units):
        least_share_s = np.inf
        for device in range(devices):
            seconds = b.unit_s[unit, device]
            if b.stays_bytes[unit] <= free[device] and seconds < np.inf:
                least_share_s = min(least_share_s, b.share[device] * seconds)
        together_s += least_share_s
    return float(together_s * (1.0 - _ROUNDING))


@inlined
def _start_on_each(  # noqa: PLR0917 - compiled loops take arrays by position
    b: Branching,
    op: int,
    home: int,
    free: IntArray,
    free_s: FloatArray,
    ready_s: FloatArray,
    starts_s: FloatArray,
) -> None:
    """Fill `starts_s` (D,) with the earliest start of `op` on each device, infinite if impossible.

    It is on device `home`, or if that is -1, on any device with enough memory for its unit.
    """
    t = b.costs
    for device in range(starts_s.shape[0]):
        starts_s[device] = np.inf
        if home >= 0 and device != home:
            continue
        if home < 0 and b.stays_bytes[b.unit_of[op]] > free[device]:
            continue
        start = max(free_s[device], t.issue_s[op])
        for i in range(t.read_start[op], t.read_start[op + 1]):
            if t.producer[t.reads[i]] >= 0:
                start = max(start, ready_s[t.reads[i], device])
        starts_s[device] = start


@inlined
def _send_to_each(  # noqa: PLR0917 - compiled loops take arrays by position
    t: CostTables,
    op: int,
    device_of: IntArray,
    ends_s: FloatArray,
    link_free: FloatArray,
    ready_s: FloatArray,
) -> None:
    """Fill `ready_s` with the earliest time at which each device can have the results of `op`.

    A link is occupied only if both `op` and the reader have been placed.
    """
    home, devices = device_of[op], ends_s.shape[0]
    for value in range(t.made_start[op], t.made_start[op + 1]):
        for target in range(devices):
            ready_s[value, target] = ends_s[target]
            for source in range(devices):
                if source == target or ends_s[source] == np.inf:
                    continue
                begin = ends_s[source]
                if home >= 0:
                    begin = max(begin, link_free[source, target])
                end = begin + t.link_latency_s[source, target]
                end += t.value_bytes[value] * t.s_per_byte[source, target]
                ready_s[value, target] = min(ready_s[value, target], end)
        if home < 0:
            continue
        for j in range(t.reader_start[value], t.reader_start[value + 1]):
            target = device_of[t.readers[j]]
            if target >= 0 and target != home:
                link_free[home, target] = ready_s[value, target]


@compiled
def _least_latency_s(
    b: Branching, device_of: IntArray, placed: int, free: IntArray, ready_s: FloatArray
) -> float:
    """Return a lower bound of the latency of all completions; exact if the placement is complete.

    `free` (D,) has upper bounds of free memory, `ready_s` (V, D) is scratch space for the earliest
    arrivals of values.
    """
    t = b.costs
    n, devices = t.op_time_s.shape
    frontier = b.first_op[placed]
    free_s, link_free = np.zeros(devices), np.zeros((devices, devices))
    starts_s, ends_s = np.empty(devices), np.empty(devices)
    begun_s, later_s = np.full(devices, np.inf), np.zeros(devices)
    longest = 0.0
    for op in range(n):
        home = device_of[op]
        _start_on_each(b, op, home, free, free_s, ready_s, starts_s)
        for device in range(devices):
            ends_s[device] = starts_s[device] + b.possible_s[op, device]
            if op >= frontier:
                begun_s[device] = min(begun_s[device], starts_s[device])
        longest = max(longest, ends_s.min())
        if home >= 0:
            free_s[home] = ends_s[home]
            if op >= frontier:
                later_s[home] += t.op_time_s[op, home]
        _send_to_each(t, op, device_of, ends_s, link_free, ready_s)
    if frontier == n or longest == np.inf:
        return float(longest)
    # A device that runs nothing from here on ends before the last operator.
    begun_s = np.minimum(begun_s, longest) + later_s
    return float(max(longest, _together_s(b, placed, free, begun_s)))


@compiled
def _least_load_s(b: Branching, device_of: IntArray, placed: int, free: IntArray) -> float:
    """Return a lower bound of the largest load of all completions."""
    t = b.costs
    n, devices = t.op_time_s.shape
    loads, links = np.zeros(devices), np.zeros((devices, devices))
    sent = np.empty(devices, dtype=np.bool_)
    for op in range(n):
        home = device_of[op]
        if home < 0:
            continue
        loads[home] += b.possible_s[op, home]
        for value in range(t.made_start[op], t.made_start[op + 1]):
            sent[:] = False
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                target = device_of[t.readers[j]]
                if target >= 0 and target != home and not sent[target]:
                    sent[target] = True
                    links[home, target] += t.link_latency_s[home, target]
                    links[home, target] += t.value_bytes[value] * t.s_per_byte[home, target]
    largest = max(loads.max(), links.max(), t.issue_s[-1])
    if placed == b.first_op.shape[0] - 1:
        return float(largest)
    return float(max(largest, _together_s(b, placed, free, loads)))


class _Nodes(NamedTuple):
    """Partial placements, and a heap of open ones by least bound, then greatest depth."""

    parent: IntArray
    device: IntArray
    depth: IntArray
    bound_s: FloatArray
    heap: IntArray


@inlined
def _before(nodes: _Nodes, a: int, b: int) -> bool:
    if nodes.bound_s[a] != nodes.bound_s[b]:
        return bool(nodes.bound_s[a] < nodes.bound_s[b])
    if nodes.depth[a] != nodes.depth[b]:
        return bool(nodes.depth[a] > nodes.depth[b])
    return a < b


@compiled
def _push(nodes: _Nodes, size: int, node: int) -> None:
    """Push a node onto a heap of the given size."""
    heap, slot = nodes.heap, size
    while slot > 0 and _before(nodes, node, heap[(slot - 1) // 2]):
        heap[slot] = heap[(slot - 1) // 2]
        slot = (slot - 1) // 2
    heap[slot] = node


@compiled
def _pop(nodes: _Nodes, size: int) -> int:
    """Pop the first node of a heap of the given size."""
    heap = nodes.heap
    first, last, slot = heap[0], heap[size - 1], 0
    while 2 * slot + 1 < size - 1:
        child = 2 * slot + 1
        if child + 1 < size - 1 and _before(nodes, heap[child + 1], heap[child]):
            child += 1
        if not _before(nodes, heap[child], last):
            break
        heap[slot] = heap[child]
        slot = child
    heap[slot] = last
    return int(first)


@inlined
def _placed_by(b: Branching, nodes: _Nodes, node: int, home: IntArray, device_of: IntArray) -> None:
    home[:] = -1
    while node > 0:
        home[nodes.depth[node] - 1] = nodes.device[node]
        node = nodes.parent[node]
    for op in range(device_of.shape[0]):
        device_of[op] = home[b.unit_of[op]]


@compiled
def least_of_all(
    b: Branching, of_load: bool, most_nodes: int, device_of: IntArray
) -> tuple[float, bool]:
    """Return a lower bound in s over placements that fit, and whether it is the optimum.

    If it is, `device_of` (n,) is set to an optimal placement. If no placement fits, the bound is
    infinite. In all other cases `device_of` is set to -1. The search stops after `most_nodes`
    nodes.
    """
    n, devices, units = device_of.shape[0], b.room.shape[0], b.first_op.shape[0] - 1
    nodes = _Nodes(
        np.full(most_nodes + devices, -1),
        np.full(most_nodes + devices, -1),
        np.zeros(most_nodes + devices, dtype=np.int64),
        np.zeros(most_nodes + devices),
        np.zeros(most_nodes + devices, dtype=np.int64),
    )
    home, change = np.empty(units, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    free = np.empty(devices, dtype=np.int64)
    ready_s = np.zeros((b.costs.producer.shape[0], devices))
    is_tried = np.empty(devices, dtype=np.bool_)
    size, count = 1, 1
    while size > 0:
        node = _pop(nodes, size)
        size -= 1
        _placed_by(b, nodes, node, home, device_of)
        if not _free_bytes(b, device_of, change, free):
            continue
        depth = nodes.depth[node]
        if depth == units:
            return nodes.bound_s[node], True
        if count > most_nodes:
            device_of[:] = -1
            return nodes.bound_s[node], False
        is_tried[:] = False
        for device in range(devices):
            is_idle = not (home[:depth] == device).any()
            if is_idle and is_tried[b.kind[device]]:
                continue
            if b.stays_bytes[depth] > free[device]:
                continue
            is_tried[b.kind[device]] |= is_idle
            for op in range(b.first_op[depth], n):
                if b.unit_of[op] == depth:
                    device_of[op] = device
            free[device] -= b.stays_bytes[depth]
            if of_load:
                bound_s = _least_load_s(b, device_of, depth + 1, free)
            else:
                bound_s = _least_latency_s(b, device_of, depth + 1, free, ready_s)
            free[device] += b.stays_bytes[depth]
            if bound_s < np.inf:
                nodes.parent[count], nodes.device[count] = node, device
                nodes.depth[count] = depth + 1
                # A parent's bound holds for its children.
                nodes.bound_s[count] = max(bound_s, nodes.bound_s[node])
                _push(nodes, size, count)
                size += 1
                count += 1
    device_of[:] = -1
    return np.inf, True
