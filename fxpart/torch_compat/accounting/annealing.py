"""Simulated annealing: `walk` shortens the longest path, `settle` makes a placement fit.

After Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 220, 1983): a
step that is worse by x is accepted with probability exp(-x / temperature), and the temperature
falls.

Random numbers are seeded and work is counted in visited operators, so that the result is
deterministic.
"""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled, inlined
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


_COOLING = 7.0
"""Natural logarithm of initial over final temperature, which is about a thousandth.

With 3, 5 or 10 the mean latency of 136 random graphs of up to 60 operators changes by less than
0.3 %."""


_STEP_WORK, _MOVE_WORK = 4, 2
"""Work of a step, and of each operator it moves, besides the visited operators. In operators; a
rough figure that also ends a walk in which no neighbour fits."""


@compiled
def allowance(hottest: float, done: int, work: int, state: IntArray) -> float:
    """Return the allowed worsening of the next step, in the unit of `hottest`.

    Drawing it before the step is evaluated accepts with the same probability, and lets bad steps be
    refused early.

    Args:
        hottest: initial temperature; 0 allows no worsening.
        done: work done so far.
        work: total work.
        state: random state, advanced by one number.

    """
    return float(-hottest * np.exp(-_COOLING * done / work) * np.log(1.0 - share(state)))


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
    """Return the shortest longest path found on the walk, and its devices.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: a placement that fits. Shape (n,).
        least_s: lower bound of the longest path; the walk ends when it is reached.
        work: number of operators to visit.
        heat: initial temperature, as a share of the start's excess over `least_s`.
        seed: random seed.

    """
    n, state = start.shape[0], chance(seed)
    placing, moved = placing_of(tables, start, memory.shape[0]), nothing_moved(n)
    paths, cuts, best = paths_of(tables, start), np.empty((n, 2), dtype=np.int64), start.copy()
    now_s = longest(paths.head)
    best_s, n_cuts, work_done = now_s, transfers(tables, start, paths.head, cuts), 0
    hottest_s = heat * (now_s - least_s)
    while work_done < work and best_s > least_s:
        work_done += _STEP_WORK
        fitting = propose(tables, placing, memory, moved, cuts, n_cuts, state)
        bound_s = now_s + (allowance(hottest_s, work_done, work, state) if fitting else 0.0)
        work_done += _MOVE_WORK * moved.many[0]
        if not fitting:
            undo(tables, placing, moved)
            continue
        accepted, visited = keep_if_short(tables, placing, moved, paths, bound_s)
        work_done += visited
        if accepted:
            now_s = longest(paths.head)
            n_cuts = transfers(tables, placing.device, paths.head, cuts)
            if now_s < best_s:
                best_s = now_s
                best[:] = placing.device
    return best_s, best


@inlined
def _move_or_exchange(
    tables: Tables, placing: Placing, devices: int, state: IntArray
) -> tuple[int, int, int, int]:
    """Move a random operator, in half of the cases in exchange for another.

    Returns the operator, its counterpart, and their previous devices. The operator is -1 if nothing
    moved, the counterpart -1 without an exchange.
    """
    n = placing.device.shape[0]
    op, target, counterpart = below(state, n), below(state, devices), -1
    origin = int(placing.device[op])
    if origin != target and share(state) < 0.5:
        counterpart = below(state, n)
        target = int(placing.device[counterpart])
    if origin == target:
        return -1, -1, origin, target
    if counterpart >= 0:
        shift(tables, placing, counterpart, origin)
    shift(tables, placing, op, target)
    return op, counterpart, origin, target


@compiled
def settle(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, start: IntArray, tries: int, heat_bytes: float, seed: int
) -> tuple[bool, IntArray]:
    """Return whether the final placement fits, and its devices.

    Each try moves an operator or exchanges two, to lower the bytes over capacity.

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        start: device of each operator. Shape (n,).
        tries: number of tries.
        heat_bytes: initial temperature; with 0, no try that raises the excess is accepted.
        seed: random seed.

    """
    devices, state = memory.shape[0], chance(seed)
    placing = placing_of(tables, start, devices)
    over = overflow(placing, memory)
    for tried in range(tries):
        if over == 0:
            break
        op, counterpart, origin, target = _move_or_exchange(tables, placing, devices, state)
        if op < 0:
            continue
        trial_over = overflow(placing, memory)
        if trial_over <= over + allowance(heat_bytes, tried, tries, state):
            over = trial_over
            continue
        shift(tables, placing, op, origin)
        if counterpart >= 0:
            shift(tables, placing, counterpart, target)
    return over == 0, placing.device
