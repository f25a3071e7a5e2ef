"""A walk over placements that shortens the longest path, by simulated annealing.

After Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 220, 1983): a
step to a neighbour that is worse by x is taken with probability exp(-x / temperature), and the
temperature sinks. The threshold is drawn before a neighbour is looked at, so that most are refused
early. Chance has a seed, and work is counted in operators looked at, so the same problem gives the
same placement in every process.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.neighbours import keep, nothing_moved, propose, transfers, undo
from fxpart.static.paths import heads, longest, tails
from fxpart.static.placing import placing_of
from fxpart.static.tables import Tables
from fxpart.static.trial import try_moved

__all__ = ["walk"]


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
    moved = nothing_moved(n)
    head, tail, cuts = heads(tables, start), np.zeros(n), np.empty((n, 2), dtype=np.int64)
    tails(tables, start, tail, n - 1)
    fresh, best, now_s = head.copy(), start.copy(), longest(head)
    best_s, found, done = now_s, transfers(tables, start, head, cuts), 0
    hot_s = heat * (now_s - least_s)
    while done < work and best_s > least_s:
        done += 4
        if not propose(tables, placing, memory, moved, cuts, found):
            done += 2 * moved.many[0]
            undo(tables, placing, moved)
            continue
        cold = hot_s * np.exp(-7.0 * done / work)
        bound_s = now_s - cold * np.log(1.0 - np.random.random())
        taken, first, after, last = try_moved(
            tables, placing.device, moved, head, tail, fresh, bound_s
        )
        done += after - first + 2 * moved.many[0]
        if not taken:
            fresh[first:after] = head[first:after]
            undo(tables, placing, moved)
            continue
        keep(moved)
        head[first:after] = fresh[first:after]
        tails(tables, placing.device, tail, last)
        done += last + 1
        now_s = longest(head)
        found = transfers(tables, placing.device, head, cuts)
        if now_s < best_s:
            best_s = now_s
            best[:] = placing.device
    return best_s, best
