"""The best placement of few operators by branch and bound, or a bound where that takes long."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.branch_and_bound import Branching, least_of_all
from fxpart.cost.device_kinds import device_kinds
from fxpart.cost.possible_times import possible_s, work_shares
from fxpart.cost.problem import Problem

__all__ = ["MOST_UNITS", "LeastPlacement", "are_few", "least_placement"]

MOST_UNITS = 40
"""Units that are placed by branch and bound, at most: with more it seldom ends."""
_MOST_WORK, _MOST_NODES = 16_000_000, 100_000
"""Parts of placements, times operators and the square of devices, that are looked at, 0.15 s of
CPU, and parts alone, 4 MB."""
_NODES_A_UNIT = 50
"""Parts for each unit that must be looked at to be worth it."""
_MOST_PLACEMENTS = 2_500_000
"""Operators times placements up to which all are looked at: half a second, as of 9 on 4."""


class LeastPlacement(NamedTuple):
    """What no placement that fits beats, and one that has it."""

    bound_s: float
    """Infinite where it is known that none fits."""
    device_of: IntArray
    """Shape (n,), -1 without one."""
    is_proven: bool
    """Whether the bound is the least of all placements that fit, or none does."""

    @property
    def fits_none(self) -> bool:
        """Whether it is known that no placement fits."""
        return math.isinf(self.bound_s)


def are_few(problem: Problem, units: int) -> bool:
    """Return whether all placements of so many units are looked at in half a second."""
    devices = problem.topology.n_devices
    work = math.log(problem.graph.n_ops) + units * math.log(devices)
    return work <= math.log(_MOST_PLACEMENTS)


@lru_cache(maxsize=8)
def least_placement(problem: Problem, objective: str) -> LeastPlacement | None:
    """Return the best of all placements for throughput, or else for latency, or a bound.

    `objective` is one of `BY_TIME`. The same in each process. None for published problems, and
    where there are too many units.
    """
    firsts, unit_of = np.unique(problem.graph.group, return_inverse=True)
    n, devices = problem.costs.op_time_s.shape
    most = min(_MOST_WORK // (n * devices * devices), _MOST_NODES)
    too_many = len(firsts) > MOST_UNITS or most < _NODES_A_UNIT * len(firsts)
    if problem.workload is not None or too_many:
        return None
    times, unit_s = possible_s(problem), np.zeros((len(firsts), devices))
    np.add.at(unit_s, unit_of, times)
    branching = Branching(
        problem.costs,
        times,
        problem.memory,
        problem.topology.memory_bytes,
        device_kinds(problem).astype(np.int64),
        unit_of.astype(np.int64),
        np.concatenate([firsts, [n]]).astype(np.int64),
        unit_s,
        _stays_bytes(problem, unit_of),
        work_shares(problem.costs.op_time_s),
    )
    device_of = np.full(n, -1, dtype=np.int64)
    bound_s, proven = least_of_all(branching, objective == "throughput", most, device_of)
    return LeastPlacement(float(bound_s), device_of, bool(proven))


def _stays_bytes(problem: Problem, unit_of: IntArray) -> IntArray:
    """Return what stays on the device of each unit that no unit before it uses. Shape (U,).

    The weights and the model's inputs that it is the first to use.
    """
    graph, m = problem.graph, problem.memory
    reader = np.repeat(np.arange(graph.n_ops), np.diff(m.read_start))
    is_input = m.producer[m.reads] < 0
    stays = np.zeros(int(unit_of.max()) + 1, dtype=np.int64)
    for ops, items, item_bytes in (
        (graph.users, m.uses, m.weight_bytes),
        (reader[is_input], m.reads[is_input], m.alloc_bytes),
    ):
        first = np.full(len(item_bytes), len(stays), dtype=np.int64)
        np.minimum.at(first, items, unit_of[ops])
        used = first < len(stays)
        np.add.at(stays, first[used], item_bytes[used])
    return stays
