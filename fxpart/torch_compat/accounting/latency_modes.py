"""Lower the latency by moving and exchanging operators: torch's ``kl_based``.

Torch takes operators in graph order and applies the move or exchange with another partition that
lowers the latency most, once each (Kernighan and Lin, "An Efficient Heuristic Procedure for
Partitioning Graphs", Bell System Technical Journal 49, 1970). Two ways to a plan:

- `fxpart.torch_compat.accounting.exact` tries torch's candidates one by one, in graphs of up to
  `EXACT_OPERATORS` operators;
- `fxpart.torch_compat.accounting.least_latency` searches, in graphs of any size: its steps are
  moves and exchanges
  too, many times, from several starts. Larger graphs get its plan.
"""

from collections.abc import Callable

from fxpart.errors import InfeasibleError
from fxpart.torch_compat.accounting.cost import latency_s
from fxpart.torch_compat.accounting.exact import exact_cost_aware, exact_kl
from fxpart.torch_compat.accounting.least_latency import least_latency
from fxpart.torch_compat.accounting.problem import StaticPlan, StaticProblem

__all__ = ["EXACT_OPERATORS", "better", "cost_aware", "kl_based"]


# The better of two plans: that of the search, or that of an exact reading of torch.

_SAME = 1e-12
"""Relative difference up to which two latencies are equal: sums in another order."""


def better(
    problem: StaticProblem, exact: Callable[[StaticProblem], StaticPlan | None]
) -> StaticPlan:
    """Return the plan of `exact` or of the search, whichever has the lower latency.

    Of equal latencies, the plan with fewer partitions; then that of `exact`.

    Raises:
        InfeasibleError: when neither finds a placement that fits the devices.

    """
    as_torch = exact(problem)
    if as_torch is None:
        return least_latency(problem)
    try:
        found = least_latency(problem)
    except InfeasibleError:
        return as_torch
    torch_s, found_s = latency_s(problem, as_torch), latency_s(problem, found)
    if abs(torch_s - found_s) > _SAME * torch_s:
        return as_torch if torch_s < found_s else found
    fewer = len(found.devices_of_partition) < len(as_torch.devices_of_partition)
    return found if fewer else as_torch


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


# Join operators to partitions while the latency does not rise: torch's ``cost_aware``.
#
# Torch begins with a partition for each operator and joins the pair that lowers the latency most,
# mapping all partitions to devices again for each candidate. Two ways to a plan:
#
# - `fxpart.torch_compat.accounting.exact` tries torch's pairs one by one, in graphs of up to
#   `EXACT_OPERATORS` operators;
# - `fxpart.torch_compat.accounting.least_latency` searches, in graphs of any size. What decides the
# latency is the   device of each operator, so that is searched; operators are joined to partitions
# afterwards, while   no path gets longer. Larger graphs get its plan, which is also that of
# `fxpart.torch_compat.accounting.latency_modes`.

COST_AWARE_EXACT_OPERATORS = 32
"""Largest graph in which torch's pairs are tried one by one: some 10 ms on one core."""


def cost_aware(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Where `size_based` has a plan, this one is no slower; up to `EXACT_OPERATORS` operators, no
    slower than that of `exact_cost_aware` where that has one. Else other starts are tried.

    Raises:
        InfeasibleError: when no placement was found that fits the devices.

    """
    if problem.graph.n_ops > COST_AWARE_EXACT_OPERATORS:
        return least_latency(problem)
    return better(problem, exact_cost_aware)
