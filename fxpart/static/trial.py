"""Whether a neighbour is good enough, looking at little more than what moved.

The heads and tails of the last accepted placement are known. A path that leaves the operators
around the move is as long as the head where it leaves them and the tail after that, so a neighbour
that is too slow is refused after a few operators. One that is not is followed as far as its heads
differ.
"""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.neighbours import Moved, keep, undo
from fxpart.static.paths import head_of, heads, tails
from fxpart.static.placing import Placing
from fxpart.static.tables import Tables

__all__ = ["Paths", "keep_if_short", "paths_of"]


class Paths(NamedTuple):
    """The longest paths of the last accepted placement of n operators. Changed in place."""

    head: FloatArray
    """Longest path that ends with each operator. Length n."""
    tail: FloatArray
    """Longest path that begins after each operator. Length n."""
    fresh: FloatArray
    """Heads of the neighbour that is looked at; between two of them, equal to `head`. Length n."""


@compiled
def paths_of(tables: Tables, device: IntArray) -> Paths:
    """Return the paths of a placement. O(reads)."""
    head, tail = heads(tables, device), np.zeros(device.shape[0])
    tails(tables, device, tail, device.shape[0] - 1)
    return Paths(head, tail, head.copy())


@compiled
def _try_moved(
    tables: Tables, device: IntArray, moved: Moved, paths: Paths, bound_s: float
) -> tuple[bool, int, int, int]:
    """Return whether no path exceeds `bound_s`, and which operators were looked at.

    The second is the first of them, the third the one after the last, the fourth the last that
    moved. Sets `paths.fresh` to the heads of those.
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
    """Keep what moved if no path exceeds `bound_s`, else undo it.

    Returns whether it was kept, and how many operators were looked at.
    """
    kept, first, after, last = _try_moved(tables, placing.device, moved, paths, bound_s)
    looked_at = after - first
    if kept:
        keep(moved)
        paths.head[first:after] = paths.fresh[first:after]
        tails(tables, placing.device, paths.tail, last)
        return True, looked_at + last + 1
    paths.fresh[first:after] = paths.head[first:after]
    undo(tables, placing, moved)
    return False, looked_at
