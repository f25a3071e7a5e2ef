"""A walk over placements that shortens the longest path, by simulated annealing.

Chance has a seed, and work is counted in operators looked at, so the same problem gives the same
placement in every process.
"""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled
from fxpart.support.random_numbers import below, chance, share
from fxpart.torch_compat.accounting.neighbours import (
    keep_if_short,
    nothing_moved,
    paths_of,
    propose,
    transfers,
    undo,
)
from fxpart.torch_compat.accounting.tables import (
    Placing,
    Tables,
    longest,
    overflow,
    placing_of,
    shift,
)

__all__ = ["allowance", "settle", "walk"]


# How much worse a step may be: the rule of simulated annealing.
#
# After Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 220, 1983): a
# step that is worse by x is taken with probability exp(-x / temperature), and the temperature
# sinks.

_COOLING = 7.0
"""Natural logarithm of the first temperature over the last: at the end it is a thousandth.

With 3, 5 or 10 the mean latency of 136 random graphs of up to 60 operators changes by less than
0.3 %."""


@compiled
def allowance(hottest: float, done: int, work: int, state: IntArray) -> float:
    """Return by how much the next step may be worse, in the unit of `hottest`.

    Drawn before the step is looked at, it decides as the probability would, and bad steps can be
    refused early.

    Args:
        hottest: first temperature; with 0 no step may be worse.
        done: work done so far.
        work: all the work that there will be.
        state: of chance, advanced by one number.

    """
    return float(-hottest * np.exp(-_COOLING * done / work) * np.log(1.0 - share(state)))


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


# Make a placement fit its devices, by random moves and exchanges.


@compiled
def _move_or_exchange(
    tables: Tables, placing: Placing, devices: int, state: IntArray
) -> tuple[int, int, int, int]:
    """Move a random operator, in half of the cases in exchange for another.

    Returns the operator, the one that came back, and the devices that they were on. Both are -1
    when nothing moved, the second when there was no exchange.
    """
    n = placing.device.shape[0]
    op, there, other = below(state, n), below(state, devices), -1
    here = int(placing.device[op])
    if here != there and share(state) < 0.5:
        other = below(state, n)
        there = int(placing.device[other])
    if here == there:
        return -1, -1, here, there
    if other >= 0:
        shift(tables, placing, other, here)
    shift(tables, placing, op, there)
    return op, other, here, there


@compiled
def settle(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, start: IntArray, tries: int, heat_bytes: float, seed: int
) -> tuple[bool, IntArray]:
    """Return whether the placement that was reached fits, and its devices.

    Each try moves an operator or exchanges two. What exceeds the devices, in all, is lowered by
    simulated annealing.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: device of each operator. Shape (n,).
        tries: how often to try.
        heat_bytes: first temperature; with 0, no try that raises what exceeds the devices is kept.
        seed: of chance.

    """
    devices, state = memory.shape[0], chance(seed)
    placing = placing_of(tables, start, devices)
    over = overflow(placing, memory)
    for done in range(tries):
        if over == 0:
            break
        op, other, here, there = _move_or_exchange(tables, placing, devices, state)
        if op < 0:
            continue
        now = overflow(placing, memory)
        if now <= over + allowance(heat_bytes, done, tries, state):
            over = now
            continue
        shift(tables, placing, op, here)
        if other >= 0:
            shift(tables, placing, other, there)
    return over == 0, placing.device
