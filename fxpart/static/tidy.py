"""Move operators to devices of their neighbours where no path gets longer: fewer transfers.

A walk moves operators that are on no long path at random. What it leaves scattered costs no latency
but traffic, and partitions.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.neighbours import keep, move, nothing_moved, undo
from fxpart.static.paths import heads, tails
from fxpart.static.placing import fits, placing_of
from fxpart.static.tables import Tables
from fxpart.static.trial import try_moved

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
def tidy(tables: Tables, memory: IntArray, start: IntArray, bound_s: float, work: int) -> IntArray:
    """Return a placement with fewer transfers, and no path longer than `bound_s`.

    Goes through the operators in graph order until one round changes nothing or `work` operators
    have been looked at. What `start` takes on no device exceeds `memory`.
    """
    n, devices = start.shape[0], memory.shape[0]
    placing, moved = placing_of(tables, start, devices), nothing_moved(n)
    device, head, tail = placing.device, heads(tables, start), np.zeros(n)
    tails(tables, start, tail, n - 1)
    fresh, done, changed = head.copy(), 0, True
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
                move(tables, placing, moved, op, there)
                done += 1
                good = fits(placing, memory)
                if good:
                    good, first, after, last = try_moved(
                        tables, device, moved, head, tail, fresh, bound_s
                    )
                    done += after - first
                    if good:
                        head[first:after] = fresh[first:after]
                        tails(tables, device, tail, last)
                        done += last
                        keep(moved)
                        changed = True
                        break
                    fresh[first:after] = head[first:after]
                undo(tables, placing, moved)
    return device
