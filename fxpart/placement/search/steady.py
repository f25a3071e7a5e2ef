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


def steadily(problem: Problem, search: Search) -> Assignment:
    """Return the fastest plan that `search` finds on all devices or, of a small model, on fewer.

    Raises:
        InfeasibleError: where the search does on all devices.

    """
    useful = useful_devices(problem)
    if len(useful) < problem.topology.n_devices:
        try:
            found = steadily(on_devices(problem, useful.tolist()), search)
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


def _with_slow_links(problem: Problem) -> Problem:
    costs = problem.costs
    slowed = costs._replace(
        s_per_byte=costs.s_per_byte * _SLOWER, link_latency_s=costs.link_latency_s * _SLOWER
    )
    return replace(problem, costs=slowed)
