"""The common entry point of `kl_based` and `cost_aware`."""

from collections.abc import Callable

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem
from fxpart.placement.device_order import fastest_first
from fxpart.placement.published.search import placed_in_steps
from fxpart.placement.search.refine import SearchOptions
from fxpart.placement.search.steady import steadily
from fxpart.placement.search.throughput import toward_objective

__all__ = ["placed_by"]


def placed_by(
    search: Callable[[Problem, SearchOptions], Assignment],
    problem: Problem,
    options: SearchOptions | None,
    published_steps: int,
) -> Assignment:
    """Return the result of `search`, improved for the objective, regardless of device order.

    For a published problem, which has its own cost model, it is the best placement after
    `published_steps` steps of the search of `mode=optimal`.

    Raises:
        InfeasibleError: if no placement is found.
        SpecError: if search options are given for a published problem.

    """
    if problem.workload is not None:
        return placed_in_steps(problem, published_steps, options)
    chosen = options or SearchOptions()
    return _placed(problem, lambda some: search(some, chosen))


@fastest_first
def _placed(problem: Problem, search: Callable[[Problem], Assignment]) -> Assignment:
    return toward_objective(problem, steadily(problem, search))
