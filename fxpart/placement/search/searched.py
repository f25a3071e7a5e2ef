"""The head that `kl_based` and `cost_aware` share: what is searched, and for what."""

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
    """Return what `search` finds, made better for the objective. The order of devices is no matter.

    Of a published problem, whose cost model is another, the best after so many steps of the search
    of `mode=optimal`.

    Raises:
        InfeasibleError: when no placement is found.
        SpecError: for options of the search, with a published problem.

    """
    if problem.workload is not None:
        return placed_in_steps(problem, published_steps, options)
    chosen = options or SearchOptions()
    return _placed(problem, lambda some: search(some, chosen))


@fastest_first
def _placed(problem: Problem, search: Callable[[Problem], Assignment]) -> Assignment:
    return toward_objective(problem, steadily(problem, search))
