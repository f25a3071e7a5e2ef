"""Devices in an order that follows from what they are: the fastest first.

A mode that goes through devices in turn, or takes the first of equals, gives other plans when they
are written in another order. It is therefore shown them in one order, however they are written.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.topology import Topology
from fxpart.cost.problem import Problem

__all__ = ["device_kinds", "fastest_first", "on_devices", "speed_order"]

_P = ParamSpec("_P")


def speed_order(problem: Problem) -> list[int]:
    """Return the devices, the one on which all operators together take the least time first.

    Of equally fast ones the largest first; of equals the first written.
    """
    total_s, sizes = problem.costs.op_time_s.sum(axis=0), problem.topology.memory_bytes
    return sorted(range(len(sizes)), key=lambda d: (float(total_s[d]), -int(sizes[d])))


def on_devices(problem: Problem, devices: Sequence[int]) -> Problem:
    """Return `problem` on some of its devices: number i there is number ``devices[i]`` here."""
    chosen = list(devices)
    square = np.ix_(chosen, chosen)
    whole, costs = problem.topology, problem.costs
    topology = Topology(
        tuple(whole.devices[d] for d in chosen), whole.bytes_per_s[square], whole.latency_s[square]
    )
    costs = costs._replace(
        op_time_s=np.ascontiguousarray(costs.op_time_s[:, chosen]),
        s_per_byte=np.ascontiguousarray(costs.s_per_byte[square]),
        link_latency_s=np.ascontiguousarray(costs.link_latency_s[square]),
    )
    return Problem(problem.graph, topology, costs, problem.memory)


def fastest_first(
    place: Callable[Concatenate[Problem, _P], Assignment],
) -> Callable[Concatenate[Problem, _P], Assignment]:
    """Return the mode `place` so that it sees the devices in `speed_order`."""

    @wraps(place)
    def placed(problem: Problem, *args: _P.args, **kwargs: _P.kwargs) -> Assignment:
        order = speed_order(problem)
        if order == list(range(len(order))):
            return place(problem, *args, **kwargs)
        found = place(on_devices(problem, order), *args, **kwargs)
        homes = tuple(
            tuple(order[device] for device in devices) for devices in found.devices_of_partition
        )
        return Assignment(found.partition_of, homes)

    return placed


def device_kinds(problem: Problem) -> IntArray:
    """Return for each device the first that is alike: equal ones may be exchanged. Shape (D,).

    Alike in memory, in the time of every operator, and in all links.
    """
    topology, times = problem.topology, problem.costs.op_time_s.T
    sizes = topology.memory_bytes.tolist()
    kinds = np.arange(topology.n_devices)
    firsts: dict[tuple[int, bytes], list[int]] = {}
    for device in range(topology.n_devices):
        same = firsts.setdefault((sizes[device], times[device].tobytes()), [])
        # Being alike is transitive: the first of each kind stands for it.
        first = next((other for other in same if _linked_alike(topology, other, device)), None)
        if first is None:
            same.append(device)
        else:
            kinds[device] = first
    return kinds


def _linked_alike(topology: Topology, a: int, b: int) -> bool:
    """Return whether exchanging the two devices leaves every link as it is."""
    for table in (topology.bytes_per_s, topology.latency_s):
        for rows in (table, table.T):
            exchanged = rows[a].copy()
            exchanged[[a, b]] = exchanged[[b, a]]
            if not np.array_equal(exchanged, rows[b]):
                return False
    return True
