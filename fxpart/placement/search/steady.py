"""Make searches nearly monotone: another device or a faster link seldom makes a plan worse.

With more hardware a local search takes another path, and may end with a worse plan. Plans found
without some of the devices, or with slower links, are valid as well. So for latency these are
searched too, breadth first: subsets, and halved rates of links while a plan waits for them. For
small models on few devices none is left out, and in practice no plan gets worse, since a search
with less hardware is one of those with more. For others, devices of one kind are all used or none,
and links are as they are; then differences are hundredths of a percent.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.partitions import partition_by_device
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.device_kinds import device_kinds
from fxpart.cost.least_placement import least_placement
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.errors import InfeasibleError
from fxpart.placement.device_order import (
    moved,
    on_devices,
    used_weight_bytes,
    useful_devices,
)
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.search.refine import SearchOptions, combine, latency_of, search_tables

__all__ = ["steadily"]

_FEW_OPERATORS, _FEW_SUBSETS = 128, 27
"""Up to these numbers, such as two devices of each of three kinds, all choices are searched: in a
second in the mean, ten for 100 operators."""
_MOST_SEARCHES = 7
"""Above these numbers: as many as three kinds of devices have subsets."""
_SLOWER = 2.0
"""Factor by which links are slowed down, as often as a plan still uses them."""
_MOST_COMMUNICATION = 30.0
"""Latency, in units of the fastest times of all operators, at which links are slow enough."""
_ROUNDING = 1e-9

_Choice = tuple[tuple[int, ...], int]
"""Number of devices of each kind, and number of slowdowns of links."""

Search = Callable[[Problem], Assignment]


def steadily(problem: Problem, search: Search) -> Assignment:
    """Return the optimum for few operators, or the best result of `search`, which is for latency.

    With few operators it is the optimal placement for throughput if that is the objective, or else
    for latency. With more and the objective latency, it is the fastest plan found on all devices
    and on subsets, as far as the limits allow.

    Raises:
        InfeasibleError: if the search on all devices raises it, or no placement fits.

    """
    useful = useful_devices(problem)
    if len(useful) < problem.topology.n_devices:
        try:
            placed = steadily(on_devices(problem, useful.tolist()), search)
        except InfeasibleError:
            raise does_not_fit(problem) from None
        return moved(placed, useful.tolist())
    optimum = least_placement(
        problem, problem.objective if problem.objective in BY_TIME else "latency"
    )
    if optimum is None or not optimum.is_proven:
        return _of_choices(problem, search) if problem.objective == "latency" else search(problem)
    if optimum.fits_none:
        raise does_not_fit(problem)
    device_of = optimum.device_of.copy()
    if problem.objective == "latency":
        # Prefer few partitions among equally fast plans.
        tables = search_tables(problem, SearchOptions())._replace(min_gain=0.0)
        combine(problem.graph, tables, device_of)
    return partition_by_device(problem.graph, device_of)


def _of_choices(problem: Problem, search: Search) -> Assignment:
    """Return the fastest plan found on all or fewer devices, with links unchanged or slower.

    Subsets are tried breadth first; those that cannot be faster than the best so far are skipped.
    """
    best = search(problem)
    least_s = latency_of(problem, best.device_of)
    _, kind_of, counts = np.unique(device_kinds(problem), return_inverse=True, return_counts=True)
    is_small = problem.graph.n_ops <= _FEW_OPERATORS and np.prod(counts + 1.0) <= _FEW_SUBSETS
    within_kind = np.array([int((kind_of[:d] == kind).sum()) for d, kind in enumerate(kind_of)])
    fewer = partial(_fewer, one_by_one=is_small)
    queue = list(fewer((tuple(counts.tolist()), 0), is_small and _may_be_slowed(problem, best)))
    known = set(queue)
    searches = 1
    for choice in queue:
        if searches >= _MOST_SEARCHES and not is_small:
            break
        count, slowed = choice
        kept = np.flatnonzero(within_kind < np.array(count)[kind_of])
        if not len(kept):
            continue
        restricted = on_devices(problem, kept.tolist())
        if not _may_be_faster(restricted, least_s):
            continue
        searches += 1
        may_be_slowed = False
        with suppress(InfeasibleError):
            slow = _with_slow_links(restricted, slowed)
            found = search(slow)
            may_be_slowed = is_small and _may_be_slowed(slow, found)
            placed = moved(found, kept.tolist())
            latency_s = latency_of(problem, placed.device_of)
            if latency_s < least_s * (1 - _ROUNDING):
                best, least_s = placed, latency_s
        for further in fewer(choice, may_be_slowed):
            if further not in known:
                known.add(further)
                queue.append(further)
    return best


def _may_be_faster(problem: Problem, least_s: float) -> bool:
    if used_weight_bytes(problem) > int(problem.topology.memory_bytes.sum()):
        return False
    return lower_bound_s(problem) < least_s * (1 - _ROUNDING)


def _may_be_slowed(problem: Problem, placed: Assignment) -> bool:
    """Return whether slower links may change the plan for `problem`.

    Not if it does not wait for them, nor if it computes for a small share of the time alone, since
    memory divides it.
    """
    compute_s = float(problem.costs.op_time_s.min(axis=1).sum())
    latency_s = latency_of(problem, placed.device_of)
    slower_s = latency_of(_with_slow_links(problem, 1), placed.device_of)
    return slower_s > latency_s * (1 + _ROUNDING) and latency_s < _MOST_COMMUNICATION * compute_s


def _fewer(choice: _Choice, may_be_slowed: bool, *, one_by_one: bool) -> Iterator[_Choice]:
    """Yield the choices with slower links, and with one device or all devices of a kind fewer."""
    count, slowed = choice
    if may_be_slowed:
        yield count, slowed + 1
    for kind, devices in enumerate(count):
        if devices:
            left = devices - 1 if one_by_one else 0
            yield (*count[:kind], left, *count[kind + 1 :]), slowed


def _with_slow_links(problem: Problem, times: int) -> Problem:
    costs, slower = problem.costs, _SLOWER**times
    slowed = costs._replace(
        s_per_byte=costs.s_per_byte * slower, link_latency_s=costs.link_latency_s * slower
    )
    return replace(problem, costs=slowed)
