"""The refinement shared by `kl_based` and `cost_aware`: improve placements, coarse to fine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray, OpGraph, csr
from fxpart.core.partitions import partition_by_device
from fxpart.cost.device_kinds import device_kinds
from fxpart.cost.incremental import make_progress
from fxpart.cost.kernels import peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables
from fxpart.errors import SpecError
from fxpart.placement.search.anneal_latency import anneal_latency
from fxpart.placement.search.local_search import SearchTables, improve, refreshed
from fxpart.placement.search.units import Units, atomic_units, module_units, working_units
from fxpart.placement.search.window_search import improve_windows
from fxpart.support.compiled import compiled
from fxpart.support.random_numbers import below

__all__ = [
    "SMALL",
    "SearchOptions",
    "combine",
    "kick",
    "latency_of",
    "neighbours",
    "refine",
    "search_tables",
]


# Combine partitions that save too little, for fewer pieces and transfers.

_ROUNDING = 1e-12
_ROUNDS = 4
"""Most passes over all partitions, as joined ones may join again; few models need a third."""


def combine(graph: OpGraph, tables: SearchTables, device_of: IntArray) -> int:
    """Join partitions with neighbours in `device_of`; return the number of joins.

    A partition moves to the device of one that it reads from or that reads from it if this reduces
    transfers, everything still fits, and the latency grows by at most `min_gain` of its initial
    value: a partition that saves less is not worthwhile. So the latency grows by a factor of at
    most 1 + `min_gain` x joins. Torch's `cost_aware` combines with a gain of 0.
    """
    worth_s = -1.0
    joins = 0
    for _ in range(_ROUNDS):
        placed = partition_by_device(graph, device_of)
        members: list[list[int]] = [[] for _ in range(placed.n_partitions)]
        for op, partition in enumerate(placed.partition_of.tolist()):
            members[partition].append(op)
        # Small partitions first, as they are the most disruptive.
        members.sort(key=len)
        new_joins, worth_s = _combine_once(tables, device_of, csr(members), graph.group, worth_s)
        joins += new_joins
        if not new_joins:
            break
    return joins


@compiled
def neighbours(t: CostTables, device_of: IntArray, unit_ops: IntArray, devices: int) -> IntArray:
    """Return the devices that the operators read from or are read by."""
    near = np.zeros(devices, dtype=np.bool_)
    for op in unit_ops:
        for i in range(t.read_start[op], t.read_start[op + 1]):
            if t.producer[t.reads[i]] >= 0:
                near[device_of[t.producer[t.reads[i]]]] = True
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                near[device_of[t.readers[j]]] = True
    near[device_of[unit_ops[0]]] = False
    return np.flatnonzero(near)


def _simulated(s: SearchTables, device_of: IntArray) -> tuple[float, float]:
    """Return the latency and the total time of transfers, in seconds."""
    latency_s, count = schedule(s.costs, device_of, s.log)
    return latency_s, float((s.log.sent_s[:count, 1] - s.log.sent_s[:count, 0]).sum())


def _combine_once(
    s: SearchTables, device_of: IntArray, units: Units, group: IntArray, worth_s: float
) -> tuple[int, float]:
    """Try each unit on neighbouring devices; return the number of moves, and the required saving.

    The latter is `worth_s`, or if that is negative, `min_gain` of the current latency.
    """
    start, ops = units
    latency, sent_s = _simulated(s, device_of)
    joins = 0
    if worth_s < 0.0:
        worth_s = latency * max(s.min_gain, _ROUNDING)
    for unit in range(len(start) - 1):
        unit_ops = ops[start[unit] : start[unit + 1]]
        home = device_of[unit_ops[0]]
        for device in neighbours(s.costs, device_of, unit_ops, len(s.sizes)):
            device_of[unit_ops] = device
            latency_s, new_sent_s = _simulated(s, device_of)
            if (
                latency_s <= latency + worth_s
                and new_sent_s < sent_s * (1.0 - _ROUNDING)
                and (device_of[group] == device_of).all()
                and peak_on_device(s.memory, device_of, device, s.change) <= s.sizes[device]
                and peak_on_device(s.memory, device_of, home, s.change) <= s.sizes[home]
            ):
                latency, sent_s, home, joins = latency_s, new_sent_s, device, joins + 1
            else:
                device_of[unit_ops] = home
    return joins, worth_s


# Escape a local optimum: move a random stretch of units, improve again, keep the better result.
#
# This is iterated local search; see Lourenço, Martin, Stützle, in: Handbook of Metaheuristics,
# 2003, https://doi.org/10.1007/0-306-48056-5_11.


@compiled
def _all_fit(s: SearchTables, device_of: IntArray) -> bool:
    for device in range(s.sizes.shape[0]):
        if peak_on_device(s.memory, device_of, device, s.change) > s.sizes[device]:
            return False
    return True


@compiled
def _kicked(device_of: IntArray, units: Units, devices: int, state: IntArray) -> IntArray:
    """Return the placement with a stretch of units on another device, or two units swapped.

    If memory is tight, only a swap may fit.
    """
    start, ops = units
    count, trial = start.shape[0] - 1, device_of.copy()
    # Usually short stretches, since large perturbations seldom lead back to an optimum.
    length = 1 + below(state, 1 + below(state, max(1, count // 4)))
    first, other = below(state, max(1, count - length + 1)), below(state, count)
    exchange = below(state, 2) == 1
    target = device_of[ops[start[other]]] if exchange else below(state, devices)
    if exchange:
        trial[ops[start[other] : start[other + 1]]] = device_of[ops[start[first]]]
    for unit in range(first, min(count, first + (1 if exchange else length))):
        trial[ops[start[unit] : start[unit + 1]]] = target
    return trial


def kick(
    s: SearchTables, device_of: IntArray, units: Units, kicks: int, max_passes: int, *, seed: int
) -> float:
    """Set `device_of` to the fastest found in `kicks` tries; return its latency in seconds."""
    state = np.array([seed], dtype=np.int64)
    latency = refreshed(s, device_of)
    for _ in range(kicks):
        trial = _kicked(device_of, units, s.sizes.shape[0], state)
        if (trial == device_of).all() or not _all_fit(s, trial):
            continue
        latency_s = improve(s, trial, units, max_passes)
        if latency_s < latency * (1.0 - s.min_gain):
            latency = latency_s
            device_of[:] = trial
    return float(latency)


LARGE, _COARSE = 16_384, 32
"""`LARGE`: operators above which only one start is refined (a minute or two for 100,000), selected
after moves of modules with at least `_COARSE` operators on average."""

USUAL_OPERATORS = 2048
"""About the size of a 7B language model, for which the default gain was measured."""

SMALL, _KICKS = 512, 64
"""Most operators for which single operators are perturbed and annealed, and perturbations."""
_STEPS_AN_OPERATOR, _MOST_WORK, _HEAT = 100, 8_000_000, 0.01
"""Annealing of small models: steps for each operator, most steps times operators (about half a
second), and the first temperature."""
_KICKS_BY_OPERATORS = 131_072
"""Perturbations of a larger model, by its smallest modules, times its operators: the larger, the
fewer, since each layer has to find improvements by itself."""

_MOST_PASSES = 1_000_000
"""A larger number can only be a typo."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Effort of a search."""

    max_passes: int = 8
    """Most passes over all units at each granularity; stops after a pass without changes."""
    min_gain: float = 1e-4
    """Share of the latency that a change, or a partition, must save in models of up to
    `USUAL_OPERATORS`; proportionally less in larger ones. Smaller gains are noise in the cost
    model; larger values give fewer partitions. Not used if branch and bound proves an optimal plan
    (`fxpart.cost.least_placement`)."""

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        if not 1 <= self.max_passes <= _MOST_PASSES:
            raise SpecError(
                f"mode.max_passes must be at least 1 and at most {_MOST_PASSES},"
                f" got {self.max_passes}"
            )
        if not 0 <= self.min_gain < 1:
            raise SpecError(f"mode.min_gain must be at least 0 and below 1, got {self.min_gain}")


def latency_of(problem: Problem, device_of: IntArray) -> float:
    """Return the simulated latency in seconds of a placement."""
    latency, _ = schedule(problem.costs, device_of, schedule_log(problem.costs))
    return float(latency)


def refine(
    problem: Problem, starts: Sequence[IntArray], options: SearchOptions
) -> tuple[IntArray, float]:
    """Return the fastest placement found from any of `starts`, and its latency in seconds.

    Each start must fit, and so does the result. From each start, modules move first, coarse to
    fine, then operators. Then chains of moves in windows continue from there, and also from the
    start itself, since neither is always better. Above `LARGE` operators, only the start that is
    best after moves of large modules is continued. To escape local optima, smaller models are
    perturbed, and small ones annealed as well. Finally, partitions that save too little are
    combined.
    """
    graph = problem.graph
    works = problem.costs.op_time_s.max(axis=1) > 0
    working, atomic = working_units(graph, works), atomic_units(graph)
    tables, passes = search_tables(problem, options), options.max_passes
    modules = module_units(graph)
    levels = (*modules, working, atomic)

    def moved(device_of: IntArray, levels: Iterable[Units]) -> IntArray:
        for units in levels:
            improve(tables, device_of, units, passes)
        return device_of

    def chained(device_of: IntArray) -> IntArray:
        improve_windows(tables, device_of, working, passes)
        improve(tables, device_of, atomic, passes)
        return device_of

    def lowest(placed: Iterable[IntArray]) -> IntArray:
        return min(placed, key=lambda device_of: latency_of(problem, device_of))

    if graph.n_ops > LARGE:
        few = sum(_COARSE * len(units[0]) <= graph.n_ops for units in levels)
        best = lowest([moved(start.copy(), levels[:few]) for start in starts])
        best = chained(moved(best, levels[few:]))
    else:
        ends = [moved(start.copy(), levels) for start in starts]
        best = lowest([chained(placed) for placed in [*ends, *(s.copy() for s in starts)]])
    if graph.n_ops <= SMALL:
        # Each finds what the other misses.
        kick(tables, best, atomic, _KICKS, passes, seed=0)
        _anneal(tables, best, working)
        improve(tables, best, atomic, passes)
    elif graph.n_ops <= LARGE and modules:
        kick(tables, best, modules[-1], _KICKS_BY_OPERATORS // graph.n_ops, passes, seed=0)
        improve(tables, best, atomic, passes)
    combine(graph, tables, best)
    return best, latency_of(problem, best)


def _anneal(tables: SearchTables, device_of: IntArray, units: Units) -> None:
    operators = len(device_of)
    steps = min(_STEPS_AN_OPERATOR * operators, _MOST_WORK // operators)
    of_problem = tables.costs, tables.memory, tables.log, tables.sizes
    anneal_latency(*of_problem, units, device_of, 1, steps, _HEAT)


def search_tables(problem: Problem, options: SearchOptions) -> SearchTables:
    """Return the tables of the inner loops for `problem`."""
    return SearchTables(
        problem.costs,
        problem.memory,
        problem.topology.memory_bytes,
        make_progress(problem.costs),
        schedule_log(problem.costs),
        # Rounding errors must never keep the search going.
        max(options.min_gain * min(1.0, USUAL_OPERATORS / problem.graph.n_ops), 1e-9),
        device_kinds(problem),
        np.zeros(problem.topology.n_devices, dtype=np.int64),
        np.empty(problem.graph.n_ops + 1, dtype=np.int64),
    )
