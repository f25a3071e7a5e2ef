"""Canonical order of devices, the fastest first.

Modes that process devices in order, or break ties by order, would give different plans for another
order of the same devices. So they see the devices in a canonical order.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import groupby
from math import factorial, prod
from typing import Concatenate, ParamSpec

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.topology import Topology
from fxpart.cost.device_kinds import device_kinds
from fxpart.cost.problem import Problem

__all__ = [
    "choices_of_devices",
    "fastest_first",
    "moved",
    "on_devices",
    "orders_of_kinds",
    "speed_order",
    "used_weight_bytes",
    "useful_devices",
]

_P = ParamSpec("_P")
_MOST_ORDERS = 24
"""Most orders of devices tried by `pipeline`."""


def speed_order(problem: Problem) -> list[int]:
    """Return the devices by total time of all operators, fastest first.

    Ties go to the larger device; then to the nearest to the previous one, which keeps the devices
    of a node together; then to the first given.
    """
    topology = problem.topology
    total_s, sizes = problem.costs.op_time_s.sum(axis=0).tolist(), topology.memory_bytes.tolist()
    by_speed = sorted(range(len(sizes)), key=lambda d: (total_s[d], -sizes[d]))
    off_diagonal = ~np.eye(len(by_speed), dtype=np.bool_)
    rates, waits = topology.bytes_per_s, topology.latency_s
    if len(by_speed) < 3 or (np.ptp(rates[off_diagonal]) == 0 and np.ptp(waits[off_diagonal]) == 0):
        return by_speed
    order: list[int] = []
    for _, equal in groupby(by_speed, key=lambda d: (total_s[d], sizes[d])):
        equal_devices = np.array(list(equal))
        while len(equal_devices):
            nearest = 0
            if order:
                rate, wait = rates[order[-1], equal_devices], waits[order[-1], equal_devices]
                nearest = int(np.where(rate == rate.max(), wait, np.inf).argmin())
            order.append(int(equal_devices[nearest]))
            equal_devices = np.delete(equal_devices, nearest)
    return order


def orders_of_kinds(problem: Problem) -> list[list[int]]:
    """Return orders of the devices that differ in more than alike devices, `speed_order` first.

    These are all such orders if there are few. Otherwise they are the fastest kind first, the
    slowest first, and the fastest first with one kind, or one device of it, moved to either end.
    Within a kind, of equal time and memory whatever their links, devices stay in `speed_order`.
    """
    total_s, sizes = problem.costs.op_time_s.sum(axis=0).tolist(), problem.topology.memory_bytes
    groups = groupby(speed_order(problem), key=lambda d: (total_s[d], int(sizes[d])))
    kinds = [list(devices) for _, devices in groups]
    order = [device for kind in kinds for device in kind]
    if len(kinds) == 1:
        return [order]
    if _fewer_orders_than(_MOST_ORDERS + 1, kinds):
        return _merges(kinds)
    orders = [order, [device for kind in reversed(kinds) for device in kind]]
    for moving in (part for kind in reversed(kinds) for part in (kind, kind[-1:])):
        others = [device for device in order if device not in moving]
        orders += [moving + others, others + moving]
    distinct = dict.fromkeys(map(tuple, orders))
    return [list(distinct_order) for distinct_order in distinct][:_MOST_ORDERS]


def _fewer_orders_than(limit: int, kinds: Sequence[Sequence[int]]) -> bool:
    count = factorial(sum(map(len, kinds))) // prod(factorial(len(kind)) for kind in kinds)
    return count < limit


def _merges(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return all ways to merge `rows` that keep the order within each; the first joins them."""
    if not any(rows):
        return [[]]
    return [
        [row[0], *rest]
        for index, row in enumerate(rows)
        if row
        for rest in _merges([*rows[:index], row[1:], *rows[index + 1 :]])
    ]


def on_devices(problem: Problem, devices: Sequence[int]) -> Problem:
    """Return `problem` restricted to some devices: device i of the result is ``devices[i]``."""
    chosen = list(devices)
    square = np.ix_(chosen, chosen)
    whole, costs = problem.topology, problem.costs
    topology = Topology(
        tuple(whole.devices[d] for d in chosen),
        whole.bytes_per_s[square],
        whole.latency_s[square],
        whole.host_launch_s,
    )
    costs = costs._replace(
        op_time_s=np.ascontiguousarray(costs.op_time_s[:, chosen]),
        s_per_byte=np.ascontiguousarray(costs.s_per_byte[square]),
        link_latency_s=np.ascontiguousarray(costs.link_latency_s[square]),
    )
    # A workload covers all of its devices, so the restricted problem keeps only the tables.
    return replace(problem, topology=topology, costs=costs, workload=None)


def moved(placed: Assignment, devices: Sequence[int]) -> Assignment:
    """Translate a plan made `on_devices` to all devices: its device i is ``devices[i]``."""
    homes = tuple(
        tuple(int(devices[home]) for home in homes) for homes in placed.devices_of_partition
    )
    return Assignment(placed.partition_of, homes)


def fastest_first(
    place: Callable[Concatenate[Problem, _P], Assignment],
) -> Callable[Concatenate[Problem, _P], Assignment]:
    """Decorate the mode `place` to see the devices in `speed_order`."""

    @wraps(place)
    def placed(problem: Problem, /, *args: _P.args, **kwargs: _P.kwargs) -> Assignment:
        order = speed_order(problem)
        if order == list(range(len(order))):
            return place(problem, *args, **kwargs)
        return moved(place(on_devices(problem, order), *args, **kwargs), order)

    return placed


def choices_of_devices(
    problem: Problem, tried: Callable[[IntArray], IntArray | None], max_subsets: int
) -> None:
    """Call `tried` with all devices, then with fewer and fewer of each kind.

    If it returns the device of each operator, only devices in use are removed next; no subset is
    missed if unused devices do not affect the result. Subsets that cannot hold the weights are
    skipped, and at most `max_subsets` subsets are considered.
    """
    kinds = device_kinds(problem)
    _, kind_of, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    within_kind = np.array([int((kinds[:d] == kinds[d]).sum()) for d in range(len(kinds))])
    weights, sizes = used_weight_bytes(problem), problem.topology.memory_bytes
    queue, known = [counts], {tuple(counts.tolist())}
    for count in queue:
        chosen = np.flatnonzero(within_kind < count[kind_of])
        if not len(chosen) or int(sizes[chosen].sum()) < weights:
            continue
        device_of = tried(chosen)
        used = np.bincount(
            kind_of[chosen if device_of is None else np.unique(device_of)], minlength=len(count)
        )
        for kind in np.flatnonzero(used):
            fewer = count.copy()
            fewer[kind] = used[kind] - 1
            if tuple(fewer.tolist()) not in known and len(known) < max_subsets:
                known.add(tuple(fewer.tolist()))
                queue.append(fewer)


def used_weight_bytes(problem: Problem) -> int:
    """Return the bytes of all weights in use, a lower bound of the memory needed."""
    used = np.unique(problem.memory.uses)
    return int(problem.memory.weight_bytes[used].sum())


def useful_devices(problem: Problem) -> IntArray:
    """Return the devices without surplus ones of a kind, which could never be used.

    A used device has at least one group of operators. Surplus nodes are removed likewise. Dropping
    devices matters because the state of a search grows with the square of their number.
    """
    kinds = device_kinds(problem)
    groups, topology = len(np.unique(problem.graph.group)), problem.topology
    firsts = np.unique(kinds)
    if len(firsts) > groups:
        nodes = Counter[tuple[int, int, float, float]]()
        node_kinds = device_kinds(on_devices(problem, firsts.tolist()))
    useful: list[int] = []
    for number, first in enumerate(firsts.tolist()):
        devices = np.flatnonzero(kinds == first)
        if len(firsts) > groups:
            # Links between any two devices of a kind are equal.
            pair = first, int(devices[-1])
            inside = float(topology.bytes_per_s[pair]), float(topology.latency_s[pair])
            node = int(node_kinds[number]), len(devices), *inside
            nodes[node] += 1
            if nodes[node] > groups:
                continue
        useful += devices[:groups].tolist()
    return np.array(sorted(useful), dtype=np.int64)
