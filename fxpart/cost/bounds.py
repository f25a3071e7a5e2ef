"""Lower bounds of latency and load, and the critical path of a placement."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.least_placement import least_placement
from fxpart.cost.memory_bound import memory_bound_s, sections_along
from fxpart.cost.possible_times import possible_s, work_shares
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.cost.roomy_bound import roomy_bound_s
from fxpart.cost.tables import CostTables
from fxpart.support.compiled import compiled, inlined

__all__ = [
    "Bounds",
    "best_bounds",
    "critical_path_s",
    "formula_bounds",
    "load_bound_s",
    "lower_bound_s",
]


class AncestorScratch(NamedTuple):
    """Scratch space for the ancestors of one operator; columns of equal length."""

    op: IntArray
    path_s: FloatArray
    cross_s: FloatArray


_FORMULAS = "work, paths and memory"
WINDOW = 48
"""Number of latest ancestors considered per operator; a wider window did not improve bounds."""


class GroupOrder(NamedTuple):
    """The order of operators that share a device. Arrays of length n."""

    group: IntArray
    before: IntArray
    """The previous operator of the same group; -1 for the first of a group."""


def group_order(group: IntArray) -> GroupOrder:
    """Return the order implied by `group` (see `OpGraph.group`). O(n log n)."""
    by_group = np.argsort(group, kind="stable").astype(np.int64)
    before = np.full(len(group), -1, dtype=np.int64)
    together = group[by_group[1:]] == group[by_group[:-1]]
    before[by_group[1:][together]] = by_group[:-1][together]
    return GroupOrder(group, before)


@inlined
def _ancestors(  # noqa: PLR0912, PLR0917 - one loop, compiled whole
    t: CostTables,
    order: GroupOrder,
    op: int,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    scratch: AncestorScratch,
) -> int:
    """Fill `scratch` with up to `WINDOW` ancestors of `op`, latest first; return their number.

    For each ancestor, `path_s` is the time of the operators between it and `op` on a path, and
    `cross_s` the cheapest transfer on that path, which is chosen to maximize their sum. Within a
    group nothing is sent, so `cross_s` is infinite.
    """
    ancestor, path_s, cross_s = scratch
    known, done = 0, 0
    current, sofar_s, least_s = op, 0.0, np.inf
    while True:
        # The reads, then the previous operator of the same group.
        for i in range(t.read_start[current], t.read_start[current + 1] + 1):
            if i < t.read_start[current + 1]:
                value = t.reads[i]
                maker = t.producer[value]
                cross = min(least_s, cheapest_s[value])
            else:
                maker, cross = order.before[current], least_s
            if maker < 0:
                continue
            if order.group[maker] == order.group[op]:
                cross = np.inf
            elif order.group[maker] == order.group[current]:
                cross = least_s
            slot = done
            while slot < known and ancestor[slot] != maker:
                slot += 1
            if slot == known:
                if known == ancestor.shape[0]:
                    continue
                ancestor[slot], path_s[slot], cross_s[slot] = maker, sofar_s, cross
                known += 1
            elif sofar_s + cross > path_s[slot] + cross_s[slot]:
                path_s[slot], cross_s[slot] = sofar_s, cross
        if done == min(known, WINDOW):
            return done
        latest = done
        for slot in range(done + 1, known):
            if ancestor[slot] > ancestor[latest]:
                latest = slot
        for column in (path_s, cross_s):
            column[done], column[latest] = column[latest], column[done]
        ancestor[done], ancestor[latest] = ancestor[latest], ancestor[done]
        current = ancestor[done]
        sofar_s, least_s = path_s[done] + time_s[current], cross_s[done]
        done += 1


@inlined
def _earliest_start(
    start_s: FloatArray,
    time_s: FloatArray,
    scratch: AncestorScratch,
    count: int,
    at_least_s: float,
) -> float:
    """Return the earliest possible start of the operator from `at_least_s` on.

    The result of an ancestor on another device arrives no earlier than `arrival`. If the operator
    starts at T, all ancestors that arrive after T must be on its own device, where they run
    sequentially. So T is at least the minimum, over the number k of latest arrivals placed locally,
    of the larger of their serial time and the next arrival.
    """
    ancestor, path_s, cross_s = scratch
    arrival = np.empty(count)
    # Ancestors are latest first. Often those with late arrivals, run in their order, are done in
    # time, and nothing has to wait: what follows would find no more, up to rounding.
    late_done_s = 0.0
    for k in range(count - 1, -1, -1):
        start, time = start_s[ancestor[k]], time_s[ancestor[k]]
        arrival[k] = start + time + path_s[k] + cross_s[k]
        if arrival[k] > at_least_s:
            late_done_s = max(late_done_s, start) + time
    if late_done_s <= at_least_s:
        return at_least_s
    by_arrival = np.argsort(-arrival)
    by_start = np.argsort(start_s[ancestor[:count]])
    is_local = np.zeros(count, dtype=np.bool_)
    best, serial_s = np.inf, 0.0
    for k in range(count + 1):
        reach = arrival[by_arrival[k]] if k < count else 0.0
        best = min(best, max(serial_s, reach))
        if k == count or serial_s >= best:
            break
        is_local[by_arrival[k]] = True
        serial_s = 0.0
        for j in by_start:
            if is_local[j]:
                serial_s = max(serial_s, start_s[ancestor[j]]) + time_s[ancestor[j]]
    return max(best, at_least_s)


@compiled
def _path_bound_s(
    t: CostTables, order: GroupOrder, time_s: FloatArray, cheapest_s: FloatArray
) -> float:
    """Return a bound from dependencies: operators share a device, or pay for a transfer.

    An operator also waits for earlier operators of its group, which run on the same device, and for
    its launch by the host.

    As in Papadimitriou and Yannakakis: Towards an architecture-independent analysis of parallel
    algorithms. SIAM J. Comput. 19(2), 1990, doi:10.1137/0219021, with transfers of several costs.
    """
    start_s = np.zeros(time_s.shape[0])
    scratch = AncestorScratch(
        np.empty(4 * WINDOW, dtype=np.int64), np.empty(4 * WINDOW), np.empty(4 * WINDOW)
    )
    longest = 0.0
    for op in range(time_s.shape[0]):
        start, waits = t.issue_s[op], t.read_start[op + 1] - t.read_start[op]
        for i in range(t.read_start[op], t.read_start[op + 1]):
            maker = t.producer[t.reads[i]]
            if maker >= 0:
                start = max(start, start_s[maker] + time_s[maker])
        if order.before[op] >= 0:
            start = max(start, start_s[order.before[op]] + time_s[order.before[op]])
            waits += 1
        if waits > 1:
            # Only at joins can a transfer, or waiting for the device, be forced.
            count = _ancestors(t, order, op, time_s, cheapest_s, scratch)
            if count:
                start = _earliest_start(start_s, time_s, scratch, count, start)
        start_s[op] = start
        longest = max(longest, start + time_s[op])
    return longest


@compiled
def critical_path_s(t: CostTables, device_of: IntArray) -> float:
    """Return the longest path of a placement in seconds, including transfers.

    Devices and links are assumed to have unlimited concurrency.
    """
    finish = np.zeros(device_of.shape[0])
    longest = 0.0
    for op in range(device_of.shape[0]):
        device, start = device_of[op], t.issue_s[op]
        for i in range(t.read_start[op], t.read_start[op + 1]):
            value = t.reads[i]
            maker = t.producer[value]
            if maker >= 0:
                ready_s = finish[maker]
                if device_of[maker] != device:
                    ready_s += t.link_latency_s[device_of[maker], device]
                    ready_s += t.value_bytes[value] * t.s_per_byte[device_of[maker], device]
                start = max(start, ready_s)
        finish[op] = start + t.op_time_s[op, device]
        longest = max(longest, finish[op])
    return longest


def _alone_s(issue_s: FloatArray, time_s: FloatArray) -> float:
    """Return the latency of a model on one device."""
    if issue_s[-1] <= 0.0:
        return float(time_s.sum())
    rest_s = time_s[::-1].cumsum()[::-1]
    return float((issue_s + rest_s).max())


class Bounds(NamedTuple):
    """Lower bounds in s over all placements of whole operators that fit."""

    latency_s: float
    load_s: float
    """Bound of the largest load of any device or link, without replicas."""
    name: str
    """Name of the proof of both bounds."""


def formula_bounds(problem: Problem) -> Bounds:
    """Return the bounds that need no search; published problems have none of the latency."""
    # One process launches all operators of an input, on all devices.
    load_s = max(load_bound_s(problem), float(problem.costs.issue_s[-1]))
    latency_s = lower_bound_s(problem) if problem.workload is None else 0.0
    return Bounds(latency_s, load_s, _FORMULAS)


@lru_cache(maxsize=8)
def best_bounds(problem: Problem) -> Bounds:
    """Return the best known bounds; for small graphs, the optimum or close to it.

    Those are searched for, which takes up to 0.3 s of CPU. Published problems have `formula_bounds`
    only. Several plans of one problem have the same bounds.
    """
    latency_s, load_s, name = formula_bounds(problem)
    if problem.workload is not None:
        return Bounds(latency_s, load_s, name)
    for objective in BY_TIME:
        optimum = least_placement(problem, objective)
        if optimum is None or math.isinf(optimum.bound_s):
            continue
        name = "branch and bound"
        if objective == "latency":
            latency_s = max(latency_s, optimum.bound_s)
        else:
            load_s = max(load_s, optimum.bound_s)
    return Bounds(latency_s, load_s, name)


def lower_bound_s(problem: Problem) -> float:
    """Return a lower bound in seconds of the latency of placements of whole operators that fit.

    A placement that splits operators over devices (tensor parallelism) can beat it. It is the
    maximum of four bounds. For the two from memory, see `fxpart.cost.memory_bound` and
    `fxpart.cost.roomy_bound`. For the one from dependencies, see `_path_bound_s`; every operator is
    on its fastest device and every transfer on the fastest link. The fourth is from work: with
    device shares y that sum to 1, any placement takes at least the sum over operators of the
    minimum of ``y_d * time_d`` (linear programming duality). The shares are proportional to speed
    on the whole model, which for equal devices gives work / D.
    """
    t, order = problem.costs, group_order(problem.graph.group)
    times = possible_s(problem)
    time_s = np.ascontiguousarray(times.min(axis=1))
    devices = t.op_time_s.shape[1]
    if devices == 1:
        return _alone_s(t.issue_s, time_s)
    off_diagonal = ~np.eye(devices, dtype=np.bool_)
    cheapest_s = (
        t.link_latency_s[off_diagonal].min() + t.value_bytes * t.s_per_byte[off_diagonal].min()
    )
    path = float(_path_bound_s(t, order, time_s, cheapest_s))
    edges, sections = sections_along(problem, order.before, time_s, cheapest_s)
    path = max(path, memory_bound_s(problem, sections, time_s))
    path = max(path, roomy_bound_s(problem, edges, sections, time_s, cheapest_s))
    return max(path, _work_bound_s(t.op_time_s, times))


def load_bound_s(problem: Problem) -> float:
    """Return a lower bound in seconds of the largest load of placements of whole operators.

    It is the maximum of the longest group of operators, which is on some device, and the bound from
    work of `lower_bound_s`.
    """
    times = possible_s(problem)
    # Operators of a group are on one device.
    together_s = np.zeros_like(times)
    np.add.at(together_s, problem.graph.group, times)
    longest = float(together_s.min(axis=1).max())
    return max(longest, _work_bound_s(problem.costs.op_time_s, times))


def _work_bound_s(op_time_s: FloatArray, times: FloatArray) -> float:
    """Return the bound from work with shares by speed; 0 if a device takes no time."""
    share = work_shares(op_time_s)
    return float((times * share).min(axis=1).sum()) if share.any() else 0.0
