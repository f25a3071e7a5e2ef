"""The search that a published problem's objective asks for, and a plan after a few of its steps."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.core.workload import Workload
from fxpart.cost.bounds import load_bound_s
from fxpart.cost.piece_bound import sample_bound_s
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError
from fxpart.placement.mtkahypar import MtkahyparOptions, is_installed, parts_of
from fxpart.placement.published.load_bound import ConfigurationBound
from fxpart.placement.published.loads import LoadSearch, best_stretches
from fxpart.placement.published.pieces import PieceSearch
from fxpart.placement.published.rows import rows
from fxpart.placement.search.load_tables import unit_tables
from fxpart.placement.search.refine import SearchOptions
from fxpart.placement.size_based import size_based

__all__ = ["KnownBound", "Proof", "Search", "begun", "placed_in_steps"]


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


class Proof(Protocol):
    """A bound that may rise, a step at a time."""

    @property
    def bound_s(self) -> float:
        """What no placement beats."""
        ...

    @property
    def name(self) -> str:
        """What proves it."""
        ...

    @property
    def tolerance(self) -> float:
        """Share that the best may be above it and count as proven."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether it will not rise any more."""
        ...

    def step(self, limit_s: float) -> None:
        """Try to raise it, for about so long."""
        ...


@dataclass(frozen=True, slots=True)
class KnownBound:
    """A bound that stays as it is."""

    bound_s: float
    name: str
    tolerance: float = 1e-9
    is_done: bool = True

    def step(self, limit_s: float) -> None:
        """Do nothing."""


def begun(
    problem: Problem, workload: Workload, seed: int
) -> tuple[Search, Callable[[], IntArray], Proof]:
    """Return a search that has its starts, what returns its best placement (n,), and a bound."""
    if problem.objective == "latency":
        pieces = PieceSearch(workload, seed)
        longest = KnownBound(sample_bound_s(workload), "pieces of a path")
        return pieces, lambda: _devices(workload, pieces.elite[0]), longest
    tables, unit_of = unit_tables(workload)
    loads = LoadSearch(tables, seed)
    lines = rows(workload.sources, workload.targets, workload.is_backward, unit_of, seed)
    start = best_stretches(tables, lines)
    if start is not None:
        loads.take(start)
    if is_installed():
        for parts in parts_of(tables, MtkahyparOptions(seed), soed=True):
            loads.take(parts)
    proof = ConfigurationBound(loads, load_bound_s(problem))
    return loads, lambda: loads.elite[0][unit_of], proof


def placed_in_steps(problem: Problem, steps: int, options: SearchOptions | None) -> Assignment:
    """Return the best placement of a published problem after so many steps. Deterministic.

    Where those find none, that of `size_based`. `options` are of a search of another kind, so that
    only their defaults are taken.

    Raises:
        InfeasibleError: when `size_based` finds none either.
        SpecError: for options that would change nothing.

    """
    assert problem.workload is not None
    usual = asdict(SearchOptions())
    for name, value in asdict(options or SearchOptions()).items():
        if value != usual[name]:
            raise SpecError(
                f"mode.{name}={value} is for models, of model=workload a fixed number of steps is"
                f" searched; use mode.{name}={usual[name]}, or mode=optimal with mode.steps"
            )
    search, device_of, _ = begun(problem, problem.workload, seed=0)
    for _ in range(steps):
        if not search.is_exhausted:
            search.round()
    if not math.isfinite(search.best_s):
        return size_based(problem)
    return partition_by_device(problem.graph, device_of())


def _devices(workload: Workload, pieces: IntArray) -> IntArray:
    """Return the device of each operator; those on the CPU have a core each, so any number."""
    return np.where(pieces < 0, workload.accelerators, pieces)
