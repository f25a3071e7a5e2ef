"""How far a pipeline stage may reach until its device is full; asked only where it matters.

The accounting is that of `fxpart.cost.kernels.peak_on_device`, over one stretch of units.
"""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.kernels import RESIDENT
from fxpart.cost.tables import MemoryTables
from fxpart.graph import IntArray
from fxpart.modes.stage_line import StageLine

__all__ = ["Reach", "StretchRoom", "UnitTables", "reach_of", "settle", "stretch_peak"]


class UnitTables(NamedTuple):
    """The part of a `StageLine` that compiled loops read."""

    unit_of: IntArray
    first_op: IntArray
    last_op: IntArray


class StretchRoom(NamedTuple):
    """Room that `stretch_peak` works in; what has an old stamp counts as empty."""

    root: IntArray
    """The value whose storage a value is in. Length V."""
    root_stamp: IntArray
    last: IntArray
    """Last operator that needs the storage of a value. Length V."""
    weight_stamp: IntArray
    """Length W."""
    kept: IntArray
    """Values that own a storage, in order of appearance. Length V."""
    change: IntArray
    """Length n + 1."""
    stamp: IntArray
    """The stamp of now, of length 1."""
    owners: IntArray
    """How many values there are in `kept`, of length 1."""


class Reach(NamedTuple):
    """What is known of a device of one size: stretches from a unit that fit it, and that do not."""

    fits: IntArray
    """Furthest cut at which a stage from each unit may end, as far as is known. Length U + 1."""
    fails: IntArray
    """Nearest cut at which it may not, as far as is known; U + 1 for none. Length U + 1."""
    memory_bytes: int


def reach_of(m: MemoryTables, line: StageLine, memory_bytes: int) -> Reach:
    """Return what is known of a device by the weights alone. O(U + uses)."""
    of_use = line.unit_of[np.repeat(np.arange(len(line.unit_of)), np.diff(m.use_start))]
    order = np.argsort(of_use, kind="stable")
    use_start = np.searchsorted(of_use[order], np.arange(line.n_units + 1))
    fails = _weights_fail(use_start, m.uses[order], m.weight_bytes, memory_bytes)
    return Reach(np.arange(line.n_units + 1), fails, memory_bytes)


@compiled
def _weights_fail(
    use_start: IntArray, uses: IntArray, weight_bytes: IntArray, memory_bytes: int
) -> IntArray:
    """Return the nearest cut to which the weights from each unit on are too much; U + 1 for none.

    Args:
        use_start: CSR starts into `uses` by unit. Length U + 1.
        uses: weights that each unit uses.
        weight_bytes: bytes of each weight.
        memory_bytes: what there is.

    """
    count = use_start.shape[0] - 1
    fails = np.full(count + 1, count + 1, dtype=np.int64)
    held = np.zeros(weight_bytes.shape[0], dtype=np.int64)
    end, used = 0, 0
    for start in range(count):
        while end < count and used <= memory_bytes:
            for i in range(use_start[end], use_start[end + 1]):
                used += weight_bytes[uses[i]] if held[uses[i]] == 0 else 0
                held[uses[i]] += 1
            end += 1
        if used <= memory_bytes:
            break
        fails[start] = end
        for i in range(use_start[start], use_start[start + 1]):
            held[uses[i]] -= 1
            used -= weight_bytes[uses[i]] if held[uses[i]] == 0 else 0
    return fails


@compiled
def _read(m: MemoryTables, room: StretchRoom, op: int, begin: int) -> int:
    """Let `op` use its weights and read its values; return the bytes of new weights and inputs."""
    stamp, root, resident = room.stamp[0], room.root, 0
    for i in range(m.use_start[op], m.use_start[op + 1]):
        if room.weight_stamp[m.uses[i]] != stamp:
            room.weight_stamp[m.uses[i]] = stamp
            resident += m.weight_bytes[m.uses[i]]
    for i in range(m.read_start[op], m.read_start[op + 1]):
        value = m.reads[i]
        if room.root_stamp[value] != stamp:
            room.root_stamp[value] = stamp
            if m.producer[value] < 0:
                root[value] = RESIDENT
                resident += m.alloc_bytes[value]
            else:
                _own(room, value, op)
                room.change[max(m.producer[value], begin)] += m.value_bytes[value]
        if root[value] >= 0:
            room.last[root[value]] = max(room.last[root[value]], op)
    return resident


@compiled
def _own(room: StretchRoom, value: int, op: int) -> None:
    """Let `value` have a storage of its own from `op` on."""
    room.root[value], room.last[value] = value, op
    room.kept[room.owners[0]] = value
    room.owners[0] += 1


@compiled
def _make(m: MemoryTables, room: StretchRoom, op: int, end: int) -> None:
    """Let `op` make its values; results of the model live to `end`."""
    stamp, root = room.stamp[0], room.root
    for value in range(m.made_start[op], m.made_start[op + 1]):
        base = m.base[value]
        if base < 0:
            _own(room, value, op)
            room.change[op] += m.alloc_bytes[value]
        elif room.root_stamp[base] == stamp:
            root[value] = root[base]
        else:
            continue
        room.root_stamp[value] = stamp
        if root[value] >= 0:
            until = end if m.is_output[value] else op
            room.last[root[value]] = max(room.last[root[value]], until)


@compiled
def stretch_peak(m: MemoryTables, units: UnitTables, room: StretchRoom, low: int, high: int) -> int:
    """Return the peak bytes of a device that has units `low` to `high` - 1.

    What is received is there from the first operator on: before that, less of it is. O(operators
    between its first and its last, and their reads).
    """
    if low == high:
        return 0
    room.stamp[0] += 1
    room.owners[0] = 0
    begin, end = units.first_op[low], units.last_op[high]
    room.change[begin : end + 2] = 0
    resident = 0
    for op in range(begin, end + 1):
        if low <= units.unit_of[op] < high:
            resident += _read(m, room, op, begin)
            _make(m, room, op, end)
    for k in range(room.owners[0]):
        value = room.kept[k]
        local = low <= units.unit_of[m.producer[value]] < high
        size = m.alloc_bytes[value] if local else m.value_bytes[value]
        room.change[room.last[value] + 1] -= size
    live, peak = 0, 0
    for op in range(begin, end + 1):
        live += room.change[op]
        peak = max(peak, live)
    return resident + peak


@compiled
def settle(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    room: StretchRoom,
    starts: IntArray,
    wanted: IntArray,
    reach: Reach,
) -> None:
    """Learn for each unit of `starts` whether a stage may reach to `wanted`, else how far it may.

    More units never need less memory when there is no backward: what a stretch reads from before it
    stays received however long it is. So the furthest end is found by doubling and halving, from
    that of the start before. It is not monotone in the start: a view may be larger than its base.
    """
    near = 0
    for start in starts:
        low, high = reach.fits[start], reach.fails[start]
        probe, step = min(wanted[start], high - 1), 0
        if wanted[start] <= low or high - low <= 1:
            near = low
            continue
        while high - low > 1 and low < wanted[start]:
            if not low < probe < high:
                probe = (low + high) // 2
            if stretch_peak(m, units, room, start, probe) <= reach.memory_bytes:
                low, probe = probe, probe + step
            else:
                high, probe = probe, (probe - step if step else near)
            step = max(1, 2 * step)
        reach.fits[start], reach.fails[start] = low, high
        near = low
