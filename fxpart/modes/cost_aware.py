"""`cost_aware`: every operator by itself at first, then what belongs together is combined.

As torch's partitioner combines the pair of partitions that lowers the predicted latency most, until
none does. Taken word for word that is cubic in the number of operators, each step a simulation: it
is done so up to `EXACT_UNITS` units (`fxpart.modes.pairwise`). Beyond, and beside it, each operator
is placed by list scheduling, as if it were a partition of its own; chains of moves in windows, and
moves of whole modules, bring together what is faster together; and partitions are combined as long
as the latency does not rise.
"""

from fxpart.assignment import Assignment
from fxpart.errors import InfeasibleError
from fxpart.graph import IntArray
from fxpart.modes.list_placement import list_placement
from fxpart.modes.pairwise import EXACT_UNITS, combine_pairs
from fxpart.modes.refine import SearchOptions, latency_of, refine
from fxpart.modes.size_based import size_based
from fxpart.modes.units import atomic_units
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem

__all__ = ["CostAwareOptions", "cost_aware"]


class CostAwareOptions(SearchOptions):
    """How long `cost_aware` tries."""


def cost_aware(problem: Problem, options: CostAwareOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is not above that of its starts. Deterministic.

    Raises:
        InfeasibleError: when no start is found.

    """
    starts = _starts(problem)
    lowest = min(starts, key=lambda placed: latency_of(problem, placed))
    device_of, latency = refine(problem, starts, options or CostAwareOptions())
    if latency_of(problem, lowest) <= latency:
        device_of = lowest
    return partition_by_device(problem.graph, device_of)


def _starts(problem: Problem) -> list[IntArray]:
    """Return placements to start from: by list scheduling, by memory alone, by pairs if small."""
    small = len(atomic_units(problem.graph)[0]) - 1 <= EXACT_UNITS
    found = [list_placement(problem), combine_pairs(problem) if small else None]
    starts = [placed for placed in found if placed is not None]
    try:
        return [*starts, size_based(problem).device_of]
    except InfeasibleError:
        if not starts:
            raise
        return starts
