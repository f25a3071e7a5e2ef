"""Neighbours of a placement, proposed at random and kept if no path gets too long.

A run of operators moves to another device. While that device is too full, other operators are moved
off it, so exchanges are neighbours too. Half of the runs begin at a transfer on the longest path,
since only a change there can shorten it.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.support.compiled import compiled, inlined
from fxpart.support.random_numbers import below, share
from fxpart.torch_compat.accounting.tables import (
    Placing,
    Tables,
    fits,
    head_of,
    heads,
    shift,
    tails,
)

__all__ = [
    "Moved",
    "Paths",
    "keep",
    "keep_if_short",
    "move",
    "nothing_moved",
    "paths_of",
    "propose",
    "transfers",
    "undo",
]

_LONGEST_RUN = 4
"""Longest run, as a divisor of the number of operators."""

_SENT_EACH, _SENT_MORE = 4, 8
"""Tries to move an operator off a full device: per moved operator, and a constant. Most tries draw
an operator on another device."""


class Moved(NamedTuple):
    """The moved operators and their previous devices. Changed in place."""

    ops: IntArray
    was: IntArray
    many: IntArray
    """Their number. Shape (1,)."""
    marked: npt.NDArray[np.bool_]
    """Whether each operator has moved. Length n."""


@compiled
def nothing_moved(n: int) -> Moved:
    """Return an empty `Moved` with room for n operators."""
    ops, old_devices = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    return Moved(ops, old_devices, np.zeros(1, dtype=np.int64), np.zeros(n, dtype=np.bool_))


@compiled
def move(tables: Tables, placing: Placing, moved: Moved, op: int, target: int) -> None:
    """Move `op` and record it."""
    moved.ops[moved.many[0]] = op
    moved.was[moved.many[0]] = placing.device[op]
    moved.many[0] += 1
    moved.marked[op] = True
    shift(tables, placing, op, target)


@compiled
def keep(moved: Moved) -> None:
    """Accept the moves by forgetting the old devices."""
    for i in range(moved.many[0]):
        moved.marked[moved.ops[i]] = False
    moved.many[0] = 0


@compiled
def undo(tables: Tables, placing: Placing, moved: Moved) -> None:
    """Undo the moves, last one first."""
    for i in range(moved.many[0] - 1, -1, -1):
        shift(tables, placing, moved.ops[i], moved.was[i])
    keep(moved)


@compiled
def transfers(tables: Tables, device: IntArray, head: FloatArray, cuts: IntArray) -> int:
    """Write producer and reader of each transfer on a longest path to `cuts`; return the count."""
    op, count = int(np.argmax(head)), 0
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
            return count
        if device[best] != device[op]:
            cuts[count, 0], cuts[count, 1] = best, op
            count += 1
        op = best


@inlined
def _length(limit: int, state: IntArray) -> int:
    """Return a random run length: 1 in half of the cases, else log-uniform."""
    if limit < 2 or share(state) < 0.5:
        return 1
    return int(np.exp(share(state) * np.log(limit + 1.0)))


@inlined
def _next(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, device: IntArray, op: int, device_id: int, direction: int, state: IntArray
) -> int:
    """Return the operator after `op` in a run on device `device_id`, or -1 at its end.

    Directions 0 and 1 follow the graph order, backward and forward; 2 follows reads, 3 readers.
    """
    if direction < 2:
        candidate = op + 2 * direction - 1
        return (
            candidate if 0 <= candidate < device.shape[0] and device[candidate] == device_id else -1
        )
    start = tables.read_start if direction == 2 else tables.reader_start
    items = tables.reads if direction == 2 else tables.readers
    count = start[op + 1] - start[op]
    if count == 0:
        return -1
    candidate = items[start[op] + below(state, count)]
    return candidate if device[candidate] == device_id else -1


@inlined
def _move_run(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    placing: Placing,
    moved: Moved,
    op: int,
    target: int,
    direction: int,
    state: IntArray,
) -> None:
    """Move a run of random length that begins with `op`."""
    origin = placing.device[op]
    length = _length(moved.ops.shape[0] // _LONGEST_RUN, state)
    while length > 0 and op >= 0:
        move(tables, placing, moved, op, target)
        op = _next(tables, placing.device, op, origin, direction, state)
        length -= 1


@inlined
def _make_room(
    tables: Tables, placing: Placing, memory: IntArray, moved: Moved, state: IntArray
) -> bool:
    """Move random operators off overfull devices; return whether all fit."""
    n, devices = placing.device.shape[0], memory.shape[0]
    came = moved.many[0]
    for _ in range(_SENT_EACH * came + _SENT_MORE):
        if fits(placing, memory):
            return True
        if moved.many[0] == n:
            return False
        op = below(state, n)
        origin = placing.device[op]
        if moved.marked[op] or placing.used[origin] <= memory[origin]:
            continue
        target = moved.was[0] if share(state) < 0.5 else below(state, devices)
        if target != origin:
            move(tables, placing, moved, op, target)
    return fits(placing, memory)


@compiled
def propose(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    placing: Placing,
    memory: IntArray,
    moved: Moved,
    cuts: IntArray,
    n_cuts: int,
    state: IntArray,
) -> bool:
    """Change `placing` to a random neighbour; return whether it fits the devices."""
    device = placing.device
    if n_cuts > 0 and share(state) < 0.5:
        which, end = below(state, n_cuts), below(state, 2)
        op, target = cuts[which, end], device[cuts[which, 1 - end]]
        direction = end + 2 * below(state, 2)
    else:
        op, target = below(state, device.shape[0]), below(state, memory.shape[0])
        direction = below(state, 4)
        if share(state) < 0.5:
            neighbour = _next_to(tables, op, state)
            target = device[neighbour] if neighbour >= 0 else target
    if device[op] == target:
        return False
    _move_run(tables, placing, moved, op, target, direction, state)
    return _make_room(tables, placing, memory, moved, state)


@inlined
def _next_to(tables: Tables, op: int, state: IntArray) -> int:
    """Return a random operator that `op` reads or that reads it, or -1."""
    n_reads = tables.read_start[op + 1] - tables.read_start[op]
    n_readers = tables.reader_start[op + 1] - tables.reader_start[op]
    if n_reads + n_readers == 0:
        return -1
    which = below(state, n_reads + n_readers)
    if which < n_reads:
        return int(tables.reads[tables.read_start[op] + which])
    return int(tables.readers[tables.reader_start[op] + which - n_reads])


# Evaluating a neighbour visits little more than the moved operators.
#
# The heads and tails of the last accepted placement are known. A path that leaves the region of the
# move is as long as the head there plus the tail after it, so a neighbour that is too slow is
# refused after a few operators. Any other neighbour is followed as far as its heads differ.


class Paths(NamedTuple):
    """The longest paths of the last accepted placement of n operators. Changed in place."""

    head: FloatArray
    """Longest path ending with each operator. Length n."""
    tail: FloatArray
    """Longest path beginning after each operator. Length n."""
    fresh: FloatArray
    """Heads of the evaluated neighbour; between two neighbours, equal to `head`. Length n."""


@compiled
def paths_of(tables: Tables, device: IntArray) -> Paths:
    """Return the paths of a placement. O(reads)."""
    head, tail = heads(tables, device), np.zeros(device.shape[0])
    tails(tables, device, tail, device.shape[0] - 1)
    return Paths(head, tail, head.copy())


@inlined
def _try_moved(
    tables: Tables, device: IntArray, moved: Moved, paths: Paths, bound_s: float
) -> tuple[bool, int, int, int]:
    """Return whether no path exceeds `bound_s`, and the range of visited operators.

    The second and third results are the start and end of the range, end excluded; the fourth is the
    last moved operator. Sets `paths.fresh` to the heads of this range.
    """
    head, tail, fresh = paths
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
def keep_if_short(
    tables: Tables, placing: Placing, moved: Moved, paths: Paths, bound_s: float
) -> tuple[bool, int]:
    """Accept the moves if no path exceeds `bound_s`, else undo them.

    Returns whether they were accepted, and the number of visited operators.
    """
    accepted, first, end, last = _try_moved(tables, placing.device, moved, paths, bound_s)
    visited = end - first
    if accepted:
        keep(moved)
        paths.head[first:end] = paths.fresh[first:end]
        tails(tables, placing.device, paths.tail, last)
        return True, visited + last + 1
    paths.fresh[first:end] = paths.head[first:end]
    undo(tables, placing, moved)
    return False, visited
