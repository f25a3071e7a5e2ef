"""Join operators to partitions while the latency does not rise: torch's ``cost_aware``.

Torch begins with a partition for each operator and joins the pair that lowers the latency most,
mapping all partitions to devices again for each candidate. Two ways to a plan:

- `fxpart.static.exact_cost_aware` tries torch's pairs one by one, in graphs of up to
  `EXACT_OPERATORS` operators;
- `fxpart.static.least_latency` searches, in graphs of any size. What decides the latency is the
  device of each operator, so that is searched; operators are joined to partitions afterwards, while
  no path gets longer. Larger graphs get its plan, which is also that of `fxpart.static.kl_based`.
"""

from fxpart.static.better import better
from fxpart.static.exact_cost_aware import exact_cost_aware
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.least_latency import least_latency

__all__ = ["EXACT_OPERATORS", "cost_aware"]

EXACT_OPERATORS = 32
"""Largest graph in which torch's pairs are tried one by one: some 10 ms on one core."""


def cost_aware(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Where `size_based` has a plan, this one is no slower; up to `EXACT_OPERATORS` operators, no
    slower than that of `exact_cost_aware` where that has one. Else other starts are tried.

    Raises:
        InfeasibleError: when no placement was found that fits the devices.

    """
    if problem.graph.n_ops > EXACT_OPERATORS:
        return least_latency(problem)
    return better(problem, exact_cost_aware)
