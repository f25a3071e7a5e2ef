"""A walk over placements that lowers the longest path, by simulated annealing.

After Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 220, 1983): a
step to a neighbour that is worse by x is taken with probability exp(-x / temperature), and the
temperature sinks. Here the threshold is drawn before a neighbour is evaluated, so that most are
refused after the few operators around the move: a path that begins before it and ends after it is
known from the heads and tails of the last accepted placement.

A neighbour moves a run of operators, of any length, to another device; others are sent away while
that device holds too much. Half of the runs begin at a transfer on the longest path, as only a
change there can lower it. Chance has a seed, and work is counted in operators looked at, so the
same problem gives the same placement in every process.
"""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.paths import head_of, heads, longest, tails
from fxpart.static.placing import Placing, fits, placing_of, shift
from fxpart.static.tables import Tables

__all__ = ["walk"]


class _Moved(NamedTuple):
    """The operators of a neighbour that moved, and where they were. Changed in place."""

    ops: IntArray
    was: IntArray
    many: IntArray
    """How many there are. Shape (1,)."""


@compiled
def _move(tables: Tables, placing: Placing, moved: _Moved, op: int, there: int) -> None:
    """Move `op` and note it."""
    moved.ops[moved.many[0]] = op
    moved.was[moved.many[0]] = placing.device[op]
    moved.many[0] += 1
    shift(tables, placing, op, there)


@compiled
def _undo(tables: Tables, placing: Placing, moved: _Moved) -> None:
    """Move all that moved back, the last one first."""
    for i in range(moved.many[0] - 1, -1, -1):
        shift(tables, placing, moved.ops[i], moved.was[i])
    moved.many[0] = 0


@compiled
def _transfers(tables: Tables, device: IntArray, head: FloatArray, cuts: IntArray) -> int:
    """Put maker and reader of each transfer on a longest path in `cuts`, and return how many."""
    op, found = int(np.argmax(head)), 0
    while True:
        best, best_s = -1, -1.0
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            maker = tables.reads[i]
            ready_s = head[maker]
            if device[maker] != device[op]:
                ready_s += tables.read_s[i]
            if ready_s > best_s:
                best, best_s = maker, ready_s
        if best < 0:
            return found
        if device[best] != device[op]:
            cuts[found, 0], cuts[found, 1] = best, op
            found += 1
        op = best


@compiled
def _length(most: int) -> int:
    """Return a random length of a run: 1 in half of the cases, else of any order of magnitude."""
    if most < 2 or np.random.random() < 0.5:
        return 1
    return int(np.exp(np.random.random() * np.log(most + 1.0)))


@compiled
def _next(tables: Tables, device: IntArray, op: int, here: int, way: int) -> int:
    """Return the operator after `op` in a run on device `here`, or -1 at its end.

    Ways 0 and 1 follow the graph order, backward and forward; 2 and 3 what is read and what reads.
    """
    if way < 2:
        near = op + 2 * way - 1
        return near if 0 <= near < device.shape[0] and device[near] == here else -1
    start = tables.read_start if way == 2 else tables.reader_start
    items = tables.reads if way == 2 else tables.readers
    count = start[op + 1] - start[op]
    if count == 0:
        return -1
    near = items[start[op] + np.random.randint(0, count)]
    return near if device[near] == here else -1


@compiled
def _move_run(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, placing: Placing, moved: _Moved, op: int, there: int, way: int
) -> None:
    """Move a run of random length that begins with `op`."""
    here = placing.device[op]
    length = _length(moved.ops.shape[0] // 4)
    while length > 0 and op >= 0:
        _move(tables, placing, moved, op, there)
        op = _next(tables, placing.device, op, here, way)
        length -= 1


@compiled
def _make_room(tables: Tables, placing: Placing, memory: IntArray, moved: _Moved) -> bool:
    """Send random operators away from devices that hold too much; return whether all fits."""
    n, devices = placing.device.shape[0], memory.shape[0]
    runs = moved.many[0]
    for _ in range(4 * runs + 8):
        if fits(placing, memory):
            return True
        if moved.many[0] == n:
            return False
        op = np.random.randint(0, n)
        here = placing.device[op]
        if placing.used[here] <= memory[here]:
            continue
        fresh = True
        for i in range(moved.many[0]):
            fresh = fresh and moved.ops[i] != op
        if not fresh:
            continue
        there = moved.was[0] if np.random.random() < 0.5 else np.random.randint(0, devices)
        if there != here:
            _move(tables, placing, moved, op, there)
    return fits(placing, memory)


@compiled
def _propose(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    placing: Placing,
    memory: IntArray,
    moved: _Moved,
    cuts: IntArray,
    found: int,
) -> bool:
    """Change `placing` to a random neighbour; return whether it fits the devices."""
    device = placing.device
    moved.many[0] = 0
    if found > 0 and np.random.random() < 0.5:
        which, end = np.random.randint(0, found), np.random.randint(0, 2)
        op, there = cuts[which, end], device[cuts[which, 1 - end]]
        way = end + 2 * np.random.randint(0, 2)
    else:
        op, there = np.random.randint(0, device.shape[0]), np.random.randint(0, memory.shape[0])
        way = np.random.randint(0, 4)
        if np.random.random() < 0.5:
            near = _next_to(tables, op)
            there = device[near] if near >= 0 else there
    if device[op] == there:
        return False
    _move_run(tables, placing, moved, op, there, way)
    return _make_room(tables, placing, memory, moved)


@compiled
def _next_to(tables: Tables, op: int) -> int:
    """Return a random operator that `op` reads or that reads it, or -1."""
    before = tables.read_start[op + 1] - tables.read_start[op]
    after = tables.reader_start[op + 1] - tables.reader_start[op]
    if before + after == 0:
        return -1
    which = np.random.randint(0, before + after)
    if which < before:
        return int(tables.reads[tables.read_start[op] + which])
    return int(tables.readers[tables.reader_start[op] + which - before])


@compiled
def _try(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    device: IntArray,
    moved: _Moved,
    head: FloatArray,
    tail: FloatArray,
    fresh: FloatArray,
    bound_s: float,
) -> tuple[bool, int, int, int]:
    """Return whether no path exceeds `bound_s`, and which operators were looked at.

    The second is the first of them, the third the one after the last, the fourth the last that
    moved. Sets `fresh` to the heads of those.
    """
    n = device.shape[0]
    first, last, reach = n, 0, 0
    for i in range(moved.many[0]):
        op = moved.ops[i]
        first, last = min(first, op), max(last, op)
        if tables.reader_start[op] < tables.reader_start[op + 1]:
            reach = max(reach, tables.readers[tables.reader_start[op + 1] - 1])
    reach = max(reach, last)
    op = first
    while op <= reach:
        end_s = head_of(tables, device, fresh, op)
        fresh[op] = end_s
        if end_s + (tail[op] if op > last else 0.0) > bound_s:
            return False, first, op + 1, last
        if end_s != head[op] and tables.reader_start[op] < tables.reader_start[op + 1]:
            reach = max(reach, tables.readers[tables.reader_start[op + 1] - 1])
        op += 1
    return True, first, op, last


@compiled
def walk(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    memory: IntArray,
    start: IntArray,
    least_s: float,
    work: int,
    heat: float,
    seed: int,
) -> tuple[float, IntArray]:
    """Return the least longest path that the walk meets, and its devices.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: a placement that fits. Shape (n,).
        least_s: a longest path below which none is; the walk ends there.
        work: how many operators to look at.
        heat: first temperature, as a share of what the start has above `least_s`.
        seed: of chance.

    """
    np.random.seed(seed)
    n = start.shape[0]
    placing = placing_of(tables, start, memory.shape[0])
    moved = _Moved(np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(1, np.int64))
    head, tail, cuts = heads(tables, start), np.zeros(n), np.empty((n, 2), dtype=np.int64)
    tails(tables, start, tail, n - 1)
    fresh, best, now_s = head.copy(), start.copy(), longest(head)
    best_s, found, done = now_s, _transfers(tables, start, head, cuts), 0
    hot_s = heat * (now_s - least_s)
    while done < work and best_s > least_s:
        done += 4
        if not _propose(tables, placing, memory, moved, cuts, found):
            done += 2 * moved.many[0]
            _undo(tables, placing, moved)
            continue
        cold = hot_s * np.exp(-7.0 * done / work)
        bound_s = now_s - cold * np.log(1.0 - np.random.random())
        taken, first, after, last = _try(tables, placing.device, moved, head, tail, fresh, bound_s)
        done += after - first + 2 * moved.many[0]
        if not taken:
            fresh[first:after] = head[first:after]
            _undo(tables, placing, moved)
            continue
        head[first:after] = fresh[first:after]
        tails(tables, placing.device, tail, last)
        done += last + 1
        now_s = longest(head)
        found = _transfers(tables, placing.device, head, cuts)
        if now_s < best_s:
            best_s = now_s
            best[:] = placing.device
    return best_s, best
