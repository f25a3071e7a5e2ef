"""`kl_based`: start from `size_based`, then move and swap while the predicted latency falls.

After Kernighan and Lin: An efficient heuristic procedure for partitioning graphs. Bell System
Technical Journal 49(2), 1970, doi:10.1002/j.1538-7305.1970.tb01770.x; torch's partitioner applies
one move or swap at a time, operator by operator. Here a move is of a module or of an operator,
single or in a chain of which the best prefix is kept, and what it changes is estimated at the cost
of what it touches. A change is kept only if every device still holds what it then has.
"""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.placement.search.refine import SearchOptions, latency_of, refine
from fxpart.placement.search.searched import placed_by
from fxpart.placement.single import devices_that_hold_all
from fxpart.placement.size_based import size_based

__all__ = ["kl_based"]

_STEPS = 2
"""Of the search of a published problem, after which its plan is returned: about a second each."""


def kl_based(problem: Problem, options: SearchOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is never above that of `size_based`.

    Where one device holds the whole model, the search starts from the fastest such device if that
    is better: devices that differ in speed cannot be left one operator at a time. Deterministic.

    Of a published problem, whose cost model is another, the best after a few steps of the search
    of `mode=optimal`.

    Raises:
        InfeasibleError: when `size_based` finds no start.
        SpecError: for options of the search, with a published problem.

    """
    return placed_by(_searched, problem, options, _STEPS)


def _searched(problem: Problem, options: SearchOptions) -> Assignment:
    start = size_based(problem)
    whole = [
        np.full(problem.graph.n_ops, device, dtype=np.int64)
        for device in devices_that_hold_all(problem)
    ]
    # The first of equals: nothing decides but latency and number.
    fastest = min([start.device_of, *whole], key=lambda placed: latency_of(problem, placed))
    device_of, latency = refine(problem, [fastest], options)
    if latency < latency_of(problem, start.device_of):
        return partition_by_device(problem.graph, device_of)
    return start
