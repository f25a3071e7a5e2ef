"""The better of two plans: that of the search, or that of an exact reading of torch."""

from collections.abc import Callable

from fxpart.errors import InfeasibleError
from fxpart.static.cost import latency_s
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.least_latency import least_latency

__all__ = ["better"]

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
