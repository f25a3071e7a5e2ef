"""The optimal placement of few operators by branch and bound, or a bound if that takes long."""

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
"""Most units placed by branch and bound; with more it seldom terminates."""
_MOST_WORK, _MOST_NODES = 16_000_000, 100_000
"""Limits of the search: nodes times operators times squared devices (0.15 s of CPU), and nodes (4
MB)."""
_NODES_A_UNIT = 50
"""Fewest nodes per unit for which the search is worthwhile."""
_MOST_PLACEMENTS = 2_500_000
"""Operators times placements up to which all are enumerated: half a second, such as 9 units on 4
devices."""


class LeastPlacement(NamedTuple):
    """A lower bound over placements that fit, and a placement that attains it if any is known."""

    bound_s: float
    """Infinite if it is known that no placement fits."""
    device_of: IntArray
    """Device of each operator, -1 if no placement is known. Shape (n,)."""
    is_proven: bool
    """Whether the bound is the optimum, or no placement fits."""

    @property
    def fits_none(self) -> bool:
        """Whether it is known that no placement fits."""
        return math.isinf(self.bound_s)


def are_few(problem: Problem, units: int) -> bool:
    """Return whether all placements of this many units can be enumerated in half a second."""
    devices = problem.topology.n_devices
    work = math.log(problem.graph.n_ops) + units * math.log(devices)
    return work <= math.log(_MOST_PLACEMENTS)


@lru_cache(maxsize=8)
def least_placement(problem: Problem, objective: str) -> LeastPlacement | None:
    """Return an optimal placement, or a bound, for an objective in `BY_TIME`.

    The result is deterministic across processes. None for published problems, and if there are too
    many units.
    """
    firsts, unit_of = np.unique(problem.graph.group, return_inverse=True)
    n, devices = problem.costs.op_time_s.shape
    node_limit = min(_MOST_WORK // (n * devices * devices), _MOST_NODES)
    too_many = len(firsts) > MOST_UNITS or node_limit < _NODES_A_UNIT * len(firsts)
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
    bound_s, proven = least_of_all(branching, objective == "throughput", node_limit, device_of)
    return LeastPlacement(float(bound_s), device_of, bool(proven))


def _stays_bytes(problem: Problem, unit_of: IntArray) -> IntArray:
    """Return the bytes of weights and inputs that each unit is the first to use. Shape (U,)."""
    graph, m = problem.graph, problem.memory
    reader = np.repeat(np.arange(graph.n_ops), np.diff(m.read_start))
    is_input = m.producer[m.reads] < 0
    resident_bytes = np.zeros(int(unit_of.max()) + 1, dtype=np.int64)
    for ops, items, item_bytes in (
        (graph.users, m.uses, m.weight_bytes),
        (reader[is_input], m.reads[is_input], m.alloc_bytes),
    ):
        first = np.full(len(item_bytes), len(resident_bytes), dtype=np.int64)
        np.minimum.at(first, items, unit_of[ops])
        used = first < len(resident_bytes)
        np.add.at(resident_bytes, first[used], item_bytes[used])
    return resident_bytes
