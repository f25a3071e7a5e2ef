"""`cost_aware`: every operator by itself at first, then what belongs together is combined.

Torch's partitioner combines the pair of partitions that lowers the predicted latency most, until
none does. With our accounting its rule is cubic in the number of operators, each step a simulation:
it is followed up to `EXACT_UNITS` units (`fxpart.placement.search.pairwise`). Beyond, and beside
it, each operator is placed by list scheduling, as if it were a partition of its own; moves of
modules, and chains of moves in windows, bring together what is faster together; and partitions that
save too little are combined.
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
from fxpart.placement.search.refine import SearchOptions, latency_of, refine
from fxpart.placement.search.searched import placed_by
from fxpart.placement.search.units import atomic_units
from fxpart.placement.size_based import size_based

__all__ = ["cost_aware"]

_STEPS = 6
"""Of the search of a published problem, after which its plan is returned: about a second each."""


def cost_aware(problem: Problem, options: SearchOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is not above that of `size_based`. Deterministic.

    Nor above that of pairs combined word for word, in a graph of up to `EXACT_UNITS` units.

    Of a published problem, whose cost model is another, the best after a few steps of the search
    of `mode=optimal`.

    Raises:
        InfeasibleError: when no start is found.
        SpecError: for options of the search, with a published problem.

    """
    return placed_by(_searched, problem, options, _STEPS)


def _searched(problem: Problem, options: SearchOptions) -> Assignment:
    listed, others = list_placement(problem), _others(problem)
    if listed is None and not others:
        raise does_not_fit(problem)
    starts = others if listed is None else [listed, *others]
    device_of, latency = refine(problem, starts, options)
    for placed in others:
        if latency_of(problem, placed) < latency:
            device_of, latency = placed, latency_of(problem, placed)
    return partition_by_device(problem.graph, device_of)


def _others(problem: Problem) -> list[IntArray]:
    """Return what is found by memory alone, and by pairs if the graph is small."""
    small = len(atomic_units(problem.graph)[0]) - 1 <= EXACT_UNITS
    combined = combine_pairs(problem) if small else None
    starts = [] if combined is None else [combined]
    with suppress(InfeasibleError):
        starts.append(size_based(problem).device_of)
    return starts
