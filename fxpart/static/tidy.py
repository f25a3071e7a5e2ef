"""Move operators to devices of their neighbours where no path gets longer: fewer transfers.

A walk moves operators that are on no long path at random. What it leaves scattered costs no latency
but traffic, and partitions.
"""

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.neighbours import Moved, move, nothing_moved, undo
from fxpart.static.placing import Placing, fits, placing_of
from fxpart.static.tables import Tables
from fxpart.static.trial import Paths, keep_if_short, paths_of

__all__ = ["tidy"]


@compiled
def _transferred(tables: Tables, device: IntArray, op: int, there: int) -> float:
    """Return the seconds of all transfers to and from `op`, were it on device `there`."""
    total_s = 0.0
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        if device[tables.reads[i]] != there:
            total_s += tables.read_s[i]
    for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
        if device[tables.readers[i]] != there:
            total_s += tables.reader_s[i]
    return total_s


@compiled
def _moves(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    memory: IntArray,
    placing: Placing,
    moved: Moved,
    paths: Paths,
    bound_s: float,
    op: int,
    there: int,
) -> tuple[bool, int]:
    """Move `op` if it fits and lengthens no path too far; return whether, and the work."""
    move(tables, placing, moved, op, there)
    if not fits(placing, memory):
        undo(tables, placing, moved)
        return False, 1
    kept, looked_at = keep_if_short(tables, placing, moved, paths, bound_s)
    return kept, 1 + looked_at


@compiled
def tidy(tables: Tables, memory: IntArray, start: IntArray, bound_s: float, work: int) -> IntArray:
    """Return a placement with fewer transfers, and no path longer than `bound_s`.

    Goes through the operators in graph order until one round changes nothing or `work` operators
    have been looked at. What `start` takes on no device exceeds `memory`.
    """
    n, devices = start.shape[0], memory.shape[0]
    placing, moved = placing_of(tables, start, devices), nothing_moved(n)
    device, paths = placing.device, paths_of(tables, start)
    done, changed = 0, True
    while changed:
        changed = False
        for op in range(n):
            now_s = _transferred(tables, device, op, device[op])
            done += 1
            if now_s == 0:
                continue
            for there in range(devices):
                if done > work:
                    return device
                if there == device[op] or _transferred(tables, device, op, there) >= now_s:
                    continue
                kept, looked_at = _moves(tables, memory, placing, moved, paths, bound_s, op, there)
                done += looked_at
                if kept:
                    changed = True
                    break
    return device
