"""Lower the latency by moving and exchanging operators: torch's ``kl_based``.

Torch takes operators in graph order and applies the move or exchange with another partition that
lowers the latency most, once each (Kernighan and Lin, "An Efficient Heuristic Procedure for
Partitioning Graphs", Bell System Technical Journal 49, 1970). Its candidates are among the
neighbours that `fxpart.static.walk` looks at, many times, from several starts.
"""

from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.least_latency import least_latency

__all__ = ["kl_based"]


def kl_based(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Where `size_based` has a plan, this one is no slower. Where it has none, other starts are tried.

    Raises:
        InfeasibleError: when no placement was found that fits the devices.

    """
    return least_latency(problem)
