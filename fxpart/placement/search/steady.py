"""Searches of small models, made so that a device or a faster link hardly ever makes a plan worse.

With more hardware a local search takes another way, and may end higher. What it finds without one
of the devices, or with links half as fast, is as good a plan: so for small models it looks there
too. In larger ones the differences are some hundredths of a percent, and searches take longer.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.all_placements import BestOfAll, best_of_all
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement.device_order import choices_of_devices, moved, on_devices, useful_devices
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.search.refine import latency_of

__all__ = ["SMALL", "steadily"]

SMALL = 24
"""Operators up to which a search is repeated."""
_MOST_DEVICES = 64
"""In all choices of devices that are searched, at most."""
_SLOWER = 2.0
_ROUNDING = 1e-9

Search = Callable[[Problem], Assignment]


def steadily(problem: Problem, search: Search, min_gain: float) -> Assignment:
    """Return the fastest plan that `search` finds on all devices or, of a small model, on fewer.

    Where there are few placements, the best of all for what is asked, unless the latency of what
    the search finds is above that by `min_gain` at most.

    Raises:
        InfeasibleError: where the search does on all devices, or no placement fits.

    """
    exact = best_of_all(problem)
    if exact is not None:
        return _best_or_near(problem, exact, search, min_gain)
    useful = useful_devices(problem)
    if len(useful) < problem.topology.n_devices:
        try:
            found = steadily(on_devices(problem, useful.tolist()), search, min_gain)
        except InfeasibleError:
            raise does_not_fit(problem) from None
        return moved(found, useful.tolist())
    if problem.graph.n_ops > SMALL:
        return search(problem)
    best = search(problem)
    least_s = latency_of(problem, best.device_of)

    def tried(devices: IntArray) -> None:
        nonlocal best, least_s
        some = on_devices(problem, devices.tolist())
        done = len(devices) == problem.topology.n_devices
        for slowed in [_with_slow_links(some)] if done else [some, _with_slow_links(some)]:
            with suppress(InfeasibleError):
                placed = moved(search(slowed), devices.tolist())
                latency_s = latency_of(problem, placed.device_of)
                if latency_s < least_s * (1 - _ROUNDING):
                    best, least_s = placed, latency_s

    choices_of_devices(problem, tried, max(1, _MOST_DEVICES // problem.topology.n_devices))
    return best


def _best_or_near(problem: Problem, best: BestOfAll, search: Search, min_gain: float) -> Assignment:
    device_of = best.of(problem.objective)
    if device_of.min() < 0:
        raise does_not_fit(problem)
    if problem.objective == "latency":
        with suppress(InfeasibleError):
            placed = search(problem)
            if latency_of(problem, placed.device_of) * (1 - min_gain) <= best.latency_s:
                return placed
    return partition_by_device(problem.graph, device_of)


def _with_slow_links(problem: Problem) -> Problem:
    costs = problem.costs
    slowed = costs._replace(
        s_per_byte=costs.s_per_byte * _SLOWER, link_latency_s=costs.link_latency_s * _SLOWER
    )
    return replace(problem, costs=slowed)
