"""`kl_based`: start from `size_based`, then move and swap while the predicted latency decreases.

After Kernighan and Lin: An efficient heuristic procedure for partitioning graphs. Bell System
Technical Journal 49(2), 1970, doi:10.1002/j.1538-7305.1970.tb01770.x; torch's partitioner applies
one move or swap of an operator at a time. Here moves are of modules or operators, individually or
in chains of which the best prefix is kept, and their effect is estimated incrementally. A change is
accepted only if everything still fits.
"""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.placement.search.placed_by import placed_by
from fxpart.placement.search.refine import SearchOptions, latency_of, refine
from fxpart.placement.single import devices_that_hold_all
from fxpart.placement.size_based import size_based

__all__ = ["kl_based"]

_STEPS = 2
"""Steps of the search for a published problem, about a second each."""


def kl_based(problem: Problem, options: SearchOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is never above that of `size_based`.

    If one device holds the whole model, the search starts from the fastest such device if that is
    better, since moving single operators cannot leave a slower device. Deterministic.

    For a published problem, which has its own cost model, this is the best placement after a few
    steps of the search of `mode=optimal`.

    Raises:
        InfeasibleError: if `size_based` finds no start.
        SpecError: if search options are given for a published problem.

    """
    return placed_by(_searched, problem, options, _STEPS)


def _searched(problem: Problem, options: SearchOptions) -> Assignment:
    start = size_based(problem)
    whole = [
        np.full(problem.graph.n_ops, device, dtype=np.int64)
        for device in devices_that_hold_all(problem)
    ]
    # Ties go to the first, so the choice depends only on latency and order.
    fastest = min([start.device_of, *whole], key=lambda placed: latency_of(problem, placed))
    device_of, latency = refine(problem, [fastest], options)
    if latency < latency_of(problem, start.device_of):
        return partition_by_device(problem.graph, device_of)
    return start
