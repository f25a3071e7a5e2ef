"""What `kl_based` and `cost_aware` share: from a placement to a faster one, coarse to fine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.cost.incremental import make_progress
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.errors import SpecError
from fxpart.graph import IntArray
from fxpart.modes.combine import combine
from fxpart.modes.kicks import kick
from fxpart.modes.local_search import SearchTables, improve
from fxpart.modes.units import atomic_units, module_units, working_units
from fxpart.modes.window_search import improve_windows
from fxpart.problem import Problem
from fxpart.topology import Topology

__all__ = ["SearchOptions", "latency_of", "refine", "search_tables"]

LARGE = 16_384
"""Operators above which one way, from one start, must do: a minute or two for 100,000."""

USUAL_OPERATORS = 2048
"""About a language model of 7 billion parameters, where the default gain was measured."""

KICKED, _KICKS = 512, 256
"""Operators up to which the search tries to leave the optimum that it found, and how often. Larger
models gained nothing from it."""

_MOST_PASSES = 1_000_000
"""More would only be a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How long a search tries."""

    max_passes: int = 8
    """Most passes over all units at each granularity; a pass that changes nothing is the last."""
    min_gain: float = 1e-4
    """Share of the latency that a change, or a partition, must save, in models of up to
    `USUAL_OPERATORS`; in larger ones, where each operator is less of the whole, in proportion less.
    Smaller gains are noise to the cost model; more of it gives fewer partitions."""

    def __post_init__(self) -> None:
        """Refuse a search that would do nothing."""
        if not 1 <= self.max_passes <= _MOST_PASSES:
            raise SpecError(
                f"mode.max_passes must be at least 1 and at most {_MOST_PASSES},"
                f" got {self.max_passes}"
            )
        if not 0 <= self.min_gain < 1:
            raise SpecError(f"mode.min_gain must be at least 0 and below 1, got {self.min_gain}")


def latency_of(problem: Problem, device_of: IntArray) -> float:
    """Return the simulated latency in seconds of one device for each operator."""
    latency, _ = schedule(problem.costs, device_of, schedule_log(problem.costs))
    return float(latency)


def refine(
    problem: Problem, starts: Sequence[IntArray], options: SearchOptions
) -> tuple[IntArray, float]:
    """Return the fastest placement found from any of `starts`, and its latency in seconds.

    Each start must respect every device's memory, and so does what is returned. From each start,
    modules move first, coarse to fine, then operators. Then chains of moves in windows go on from
    there, and from the start itself too, since neither always ends lower. Above `LARGE` operators
    they go on from the best end only. Small models are kicked out of their optimum; and in the end
    partitions that save too little are combined.
    """
    graph = problem.graph
    works = problem.costs.op_time_s.max(axis=1) > 0
    working, atomic = working_units(graph, works), atomic_units(graph)
    tables, passes = search_tables(problem, options), options.max_passes

    def moved(device_of: IntArray) -> IntArray:
        for units in (*module_units(graph), working, atomic):
            improve(tables, device_of, units, passes)
        return device_of

    def chained(device_of: IntArray) -> IntArray:
        improve_windows(tables, device_of, working, passes)
        improve(tables, device_of, atomic, passes)
        return device_of

    def lowest(placed: Iterable[IntArray]) -> IntArray:
        return min(placed, key=lambda device_of: latency_of(problem, device_of))

    coarse = [moved(start.copy()) for start in starts]
    if graph.n_ops > LARGE:
        best = chained(lowest(coarse))
    else:
        best = lowest([chained(placed) for placed in [*coarse, *(s.copy() for s in starts)]])
    if graph.n_ops <= KICKED:
        kick(tables, best, atomic, _KICKS, passes, seed=0)
    combine(graph, tables, best)
    return best, latency_of(problem, best)


def search_tables(problem: Problem, options: SearchOptions) -> SearchTables:
    """Return what the inner loops read and write for `problem`."""
    return SearchTables(
        problem.costs,
        problem.memory,
        problem.topology.memory_bytes,
        make_progress(problem.costs),
        schedule_log(problem.costs),
        # Rounding alone must never keep the search going.
        max(options.min_gain * min(1.0, USUAL_OPERATORS / problem.graph.n_ops), 1e-9),
        _kinds(problem.topology),
        np.zeros(problem.topology.n_devices, dtype=np.int64),
        np.empty(problem.graph.n_ops + 1, dtype=np.int64),
    )


def _kinds(topology: Topology) -> IntArray:
    """Return a number for each device; equal ones may be exchanged while both are idle."""
    specs = [
        (d.memory_bytes, d.memory_bandwidth_bytes_per_s, tuple(sorted(d.flops_per_s.items())))
        for d in topology.devices
    ]
    kinds: list[int] = []
    for device in range(topology.n_devices):
        alike = (
            other
            for other in range(device)
            if specs[other] == specs[device] and _linked_alike(topology, other, device)
        )
        kinds.append(next((kinds[other] for other in alike), device))
    return np.array(kinds, dtype=np.int64)


def _linked_alike(topology: Topology, a: int, b: int) -> bool:
    """Return whether exchanging the two devices leaves every link as it is."""
    for table in (topology.bytes_per_s, topology.latency_s):
        for rows in (table, table.T):
            exchanged = rows[a].copy()
            exchanged[[a, b]] = exchanged[[b, a]]
            if not np.array_equal(exchanged, rows[b]):
                return False
    return True
