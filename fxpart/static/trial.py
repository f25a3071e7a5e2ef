"""Whether a neighbour is good enough, looking at little more than what moved.

The heads and tails of the last accepted placement are known. A path that leaves the operators
around the move is as long as the head where it leaves them and the tail after that, so a neighbour
that is too slow is refused after a few operators. One that is not is followed as far as its heads
differ.
"""

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.neighbours import Moved
from fxpart.static.paths import head_of
from fxpart.static.tables import Tables

__all__ = ["try_moved"]


@compiled
def try_moved(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    device: IntArray,
    moved: Moved,
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
