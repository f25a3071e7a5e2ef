"""A walk over placements that shortens the longest path, by simulated annealing.

Chance has a seed, and work is counted in operators looked at, so the same problem gives the same
placement in every process.
"""

import numpy as np

from fxpart.chance import chance
from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.annealing import allowance
from fxpart.static.neighbours import nothing_moved, propose, transfers, undo
from fxpart.static.paths import longest
from fxpart.static.placing import placing_of
from fxpart.static.tables import Tables
from fxpart.static.trial import keep_if_short, paths_of

__all__ = ["walk"]

_STEP_WORK, _MOVE_WORK = 4, 2
"""What a step and each operator that it moves count as work, besides the operators looked at. In
operators; rough, so that a walk ends also where no neighbour fits."""


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
    n, state = start.shape[0], chance(seed)
    placing, moved = placing_of(tables, start, memory.shape[0]), nothing_moved(n)
    paths, cuts, best = paths_of(tables, start), np.empty((n, 2), dtype=np.int64), start.copy()
    now_s = longest(paths.head)
    best_s, found, done = now_s, transfers(tables, start, paths.head, cuts), 0
    hottest_s = heat * (now_s - least_s)
    while done < work and best_s > least_s:
        done += _STEP_WORK
        fitting = propose(tables, placing, memory, moved, cuts, found, state)
        bound_s = now_s + (allowance(hottest_s, done, work, state) if fitting else 0.0)
        done += _MOVE_WORK * moved.many[0]
        if not fitting:
            undo(tables, placing, moved)
            continue
        kept, looked_at = keep_if_short(tables, placing, moved, paths, bound_s)
        done += looked_at
        if kept:
            now_s = longest(paths.head)
            found = transfers(tables, placing.device, paths.head, cuts)
            if now_s < best_s:
                best_s = now_s
                best[:] = placing.device
    return best_s, best
