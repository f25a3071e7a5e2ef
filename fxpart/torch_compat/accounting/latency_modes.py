"""`kl_based` and `cost_aware`: torch's modes that minimize latency.

Torch's ``kl_based`` takes operators in graph order and applies the move or exchange with another
partition that lowers the latency most, once each (Kernighan and Lin, "An Efficient Heuristic
Procedure for Partitioning Graphs", Bell System Technical Journal 49, 1970). Its ``cost_aware``
begins with one partition per operator and joins the pair that lowers the latency most, remapping
all partitions to devices for each candidate. For both, there are two ways to find a plan:

- `fxpart.torch_compat.accounting.exact` tries torch's candidates one by one, in small graphs;
- `fxpart.torch_compat.accounting.least_latency` searches graphs of any size by many moves and
  exchanges from several starts. It searches over devices of operators, which determine the latency;
  operators are joined into partitions afterwards, as long as no path gets longer.
"""

from collections.abc import Callable

from fxpart.errors import InfeasibleError
from fxpart.torch_compat.accounting.cost import latency_s
from fxpart.torch_compat.accounting.exact import exact_cost_aware, exact_kl
from fxpart.torch_compat.accounting.least_latency import least_latency
from fxpart.torch_compat.accounting.problem import StaticPlan, StaticProblem

__all__ = [
    "COST_AWARE_EXACT_OPERATORS",
    "KL_EXACT_OPERATORS",
    "better",
    "cost_aware",
    "kl_based",
]

KL_EXACT_OPERATORS = 64
"""Largest graph in which torch's exchanges are tried one by one, about 8 ms on one core."""

COST_AWARE_EXACT_OPERATORS = 32
"""Largest graph in which torch's pairs are tried one by one, about 10 ms on one core."""

_SAME = 1e-12
"""Relative difference below which two latencies are equal, as from reordered sums."""


def better(
    problem: StaticProblem, exact: Callable[[StaticProblem], StaticPlan | None]
) -> StaticPlan:
    """Return the plan of `exact` or of the search, whichever has the lower latency.

    If tied, the plan with fewer partitions wins, then that of `exact`.

    Raises:
        InfeasibleError: if neither finds a placement that fits the devices.

    """
    as_torch = exact(problem)
    if as_torch is None:
        return least_latency(problem)
    try:
        searched = least_latency(problem)
    except InfeasibleError:
        return as_torch
    torch_s, searched_s = latency_s(problem, as_torch), latency_s(problem, searched)
    if abs(torch_s - searched_s) > _SAME * torch_s:
        return as_torch if torch_s < searched_s else searched
    fewer = len(searched.devices_of_partition) < len(as_torch.devices_of_partition)
    return searched if fewer else as_torch


def kl_based(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Never slower than the plan of `size_based` and, up to `KL_EXACT_OPERATORS` operators, than that
    of `exact_kl`, if there is one.

    Raises:
        InfeasibleError: if no placement was found that fits the devices.

    """
    if problem.graph.n_ops > KL_EXACT_OPERATORS:
        return least_latency(problem)
    return better(problem, exact_kl)


def cost_aware(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Never slower than the plan of `size_based` and, up to `COST_AWARE_EXACT_OPERATORS` operators,
    than that of `exact_cost_aware`, if there is one.

    Raises:
        InfeasibleError: if no placement was found that fits the devices.

    """
    if problem.graph.n_ops > COST_AWARE_EXACT_OPERATORS:
        return least_latency(problem)
    return better(problem, exact_cost_aware)
