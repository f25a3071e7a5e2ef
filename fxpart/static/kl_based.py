"""Lower the latency by moving and exchanging operators: torch's ``kl_based``.

Torch takes operators in graph order and applies the move or exchange with another partition that
lowers the latency most, once each (Kernighan and Lin, "An Efficient Heuristic Procedure for
Partitioning Graphs", Bell System Technical Journal 49, 1970). Two ways to a plan:

- `fxpart.static.exact_kl` tries torch's candidates one by one, in graphs of up to
  `EXACT_OPERATORS` operators;
- `fxpart.static.least_latency` searches, in graphs of any size: its steps are moves and exchanges
  too, many times, from several starts. Larger graphs get its plan.
"""

from fxpart.static.better import better
from fxpart.static.exact_kl import exact_kl
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.least_latency import least_latency

__all__ = ["EXACT_OPERATORS", "kl_based"]

EXACT_OPERATORS = 64
"""Largest graph in which torch's candidates are tried one by one: some 8 ms on one core."""


def kl_based(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Where `size_based` has a plan, this one is no slower, and up to `EXACT_OPERATORS` operators no
    slower than that of `exact_kl`. Where it has none, other starts are tried.

    Raises:
        InfeasibleError: when no placement was found that fits the devices.

    """
    if problem.graph.n_ops > EXACT_OPERATORS:
        return least_latency(problem)
    return better(problem, exact_kl)
