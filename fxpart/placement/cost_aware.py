"""`cost_aware`: start with every operator by itself, then combine.

Torch's partitioner repeatedly combines the pair of partitions that lowers the predicted latency
most, until none does. With our accounting this rule takes a cubic number of simulations, so it is
followed only up to `EXACT_UNITS` units (`fxpart.placement.search.pairwise`). In addition, at any
size, each operator is placed by list scheduling as if it were a partition of its own; moves of
modules, and chains of moves in windows, bring operators together; and partitions that save too
little are combined.
"""

from contextlib import suppress

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.search.list_scheduling import list_placement
from fxpart.placement.search.pairwise import EXACT_UNITS, combine_pairs
from fxpart.placement.search.placed_by import placed_by
from fxpart.placement.search.refine import SearchOptions, latency_of, refine
from fxpart.placement.search.units import atomic_units
from fxpart.placement.size_based import size_based

__all__ = ["cost_aware"]

_STEPS = 6
"""Steps of the search for a published problem, about a second each."""


def cost_aware(problem: Problem, options: SearchOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is not above that of `size_based`. Deterministic.

    In graphs of up to `EXACT_UNITS` units, it is not above that of torch's rule either.

    For a published problem, which has its own cost model, this is the best placement after a few
    steps of the search of `mode=optimal`.

    Raises:
        InfeasibleError: if no start is found.
        SpecError: if search options are given for a published problem.

    """
    return placed_by(_searched, problem, options, _STEPS)


def _searched(problem: Problem, options: SearchOptions) -> Assignment:
    list_scheduled, others = list_placement(problem), _others(problem)
    if list_scheduled is None and not others:
        raise does_not_fit(problem)
    starts = others if list_scheduled is None else [list_scheduled, *others]
    device_of, latency = refine(problem, starts, options)
    for placed in others:
        if latency_of(problem, placed) < latency:
            device_of, latency = placed, latency_of(problem, placed)
    return partition_by_device(problem.graph, device_of)


def _others(problem: Problem) -> list[IntArray]:
    """Return the placements by memory alone, and by pairs if the graph is small."""
    small = len(atomic_units(problem.graph)[0]) - 1 <= EXACT_UNITS
    combined = combine_pairs(problem) if small else None
    starts = [] if combined is None else [combined]
    with suppress(InfeasibleError):
        starts.append(size_based(problem).device_of)
    return starts
