"""The search that a published problem's objective asks for, and a plan after a few of its steps."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.core.workload import Workload
from fxpart.cost.problem import Problem
from fxpart.placement.published.loads import LoadSearch, best_stretches
from fxpart.placement.published.pieces import PieceSearch
from fxpart.placement.published.rows import rows
from fxpart.placement.search.load_tables import unit_tables
from fxpart.placement.size_based import size_based

__all__ = ["Search", "begun", "placed_in_steps"]


class Search(Protocol):
    """A search that goes on a step at a time, the same for a seed."""

    @property
    def best_s(self) -> float:
        """What is to be small, of the best placement so far; infinite before there is one."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether there is no placement to go on from, and none will be found."""
        ...

    def round(self) -> None:
        """Search on for a step."""
        ...


def begun(workload: Workload, objective: str, seed: int) -> tuple[Search, Callable[[], IntArray]]:
    """Return a search that has its starts, and what returns its best placement (n,)."""
    if objective == "latency":
        pieces = PieceSearch(workload, seed)
        return pieces, lambda: _devices(workload, pieces.elite[0])
    tables, unit_of = unit_tables(workload)
    loads = LoadSearch(tables, seed)
    lines = rows(workload.sources, workload.targets, workload.is_backward, unit_of, seed)
    start = best_stretches(tables, lines)
    if start is not None:
        loads.take(start)
    return loads, lambda: loads.elite[0][unit_of]


def placed_in_steps(problem: Problem, steps: int) -> Assignment:
    """Return the best placement of a published problem after so many steps. Deterministic.

    Where those find none, that of `size_based`.

    Raises:
        InfeasibleError: when `size_based` finds none either.

    """
    assert problem.workload is not None
    search, device_of = begun(problem.workload, problem.objective, seed=0)
    for _ in range(steps):
        if not search.is_exhausted:
            search.round()
    if not math.isfinite(search.best_s):
        return size_based(problem)
    return partition_by_device(problem.graph, device_of())


def _devices(workload: Workload, pieces: IntArray) -> IntArray:
    """Return the device of each operator; those on the CPU have a core each, so any number."""
    return np.where(pieces < 0, workload.accelerators, pieces)
