"""Select the search for a published problem's objective, and run it for a few steps."""

import math
import time
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
from fxpart.placement.published.cp_sat_bound import CpSatBound, has_cp_sat
from fxpart.placement.published.load_bound import ConfigurationBound
from fxpart.placement.published.loads import LoadSearch, best_stretches
from fxpart.placement.published.pieces import PieceSearch
from fxpart.placement.published.unit_orders import rows
from fxpart.placement.search.load_tables import unit_tables
from fxpart.placement.search.refine import SearchOptions
from fxpart.placement.size_based import size_based

__all__ = ["Both", "KnownBound", "Proof", "Search", "begun", "placed_in_steps"]


class Search(Protocol):
    """A search that runs a step at a time, deterministic for a seed."""

    @property
    def best_s(self) -> float:
        """The objective of the best placement so far; infinite if there is none yet."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether there is no placement to continue from, and none will be found."""
        ...

    def round(self) -> None:
        """Run one step."""
        ...


class Proof(Protocol):
    """A lower bound that may be improved a step at a time."""

    @property
    def bound_s(self) -> float:
        """The lower bound proven so far."""
        ...

    @property
    def name(self) -> str:
        """Name of the proof."""
        ...

    @property
    def tolerance(self) -> float:
        """Relative gap within which the best placement counts as proven."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the bound cannot be improved further."""
        ...

    def step(self, limit_s: float) -> None:
        """Try to improve the bound for about `limit_s`."""
        ...


@dataclass(frozen=True, slots=True)
class KnownBound:
    """A fixed bound."""

    bound_s: float
    name: str
    tolerance: float = 1e-9
    is_done: bool = True

    def step(self, limit_s: float) -> None:
        """Do nothing."""


@dataclass(eq=False, slots=True)
class Both:
    """The higher of two bounds of the largest load, each of which gets half of the time."""

    relaxed: ConfigurationBound
    whole: CpSatBound
    bound_s: float
    name: str = "work"
    _relaxed_s: float = 0.0
    """Time spent on `relaxed`."""
    _whole_s: float = 0.0

    @property
    def tolerance(self) -> float:
        """Relative gap within which the best placement counts as proven."""
        return self.relaxed.tolerance

    @property
    def is_done(self) -> bool:
        """Whether neither bound can be improved further."""
        return self.relaxed.is_done and self.whole.is_done

    def step(self, limit_s: float) -> None:
        """Improve the bound that took less time so far; both without a limit of time."""
        is_turn_of_whole = self.relaxed.is_done or (
            not self.whole.is_done and self._whole_s < self._relaxed_s
        )
        begin = time.monotonic()
        if not self.relaxed.is_done and (not is_turn_of_whole or math.isinf(limit_s)):
            self.relaxed.step(limit_s)
            self._relaxed_s += time.monotonic() - begin
        begin = time.monotonic()
        if not self.whole.is_done and (is_turn_of_whole or math.isinf(limit_s)):
            self.whole.step(limit_s)  # does nothing until there is time for all of a solution
            self._whole_s += time.monotonic() - begin
        for proof in (self.relaxed, self.whole):
            if proof.bound_s > self.bound_s:
                self.bound_s, self.name = proof.bound_s, proof.name
        self.relaxed.bound_s = self.whole.bound_s = self.bound_s


def begun(
    problem: Problem, workload: Workload, seed: int
) -> tuple[Search, Callable[[], IntArray], Proof]:
    """Return an initialized search, a getter of its best placement (n,), and a bound."""
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
    least_s = load_bound_s(problem)
    relaxed = ConfigurationBound(loads, least_s)
    proof = Both(relaxed, CpSatBound(loads, least_s), least_s) if has_cp_sat() else relaxed
    return loads, lambda: loads.elite[0][unit_of], proof


def placed_in_steps(problem: Problem, steps: int, options: SearchOptions | None) -> Assignment:
    """Return the best placement of a published problem after `steps` steps. Deterministic.

    If none is found, the placement of `size_based` is returned. `options` belong to another kind of
    search, so only their defaults are accepted.

    Raises:
        InfeasibleError: if `size_based` finds none either.
        SpecError: if an option differs from its default.

    """
    assert problem.workload is not None
    usual = asdict(SearchOptions())
    for name, value in asdict(options or SearchOptions()).items():
        if value != usual[name]:
            raise SpecError(
                f"mode.{name}={value} applies to models, but model=workload searches a fixed "
                f"number of steps; use mode.{name}={usual[name]}, or mode=optimal with mode.steps"
            )
    search, device_of, _ = begun(problem, problem.workload, seed=0)
    for _ in range(steps):
        if not search.is_exhausted:
            search.round()
    if not math.isfinite(search.best_s):
        return size_based(problem)
    return partition_by_device(problem.graph, device_of())


def _devices(workload: Workload, pieces: IntArray) -> IntArray:
    """Return the device of each operator; the CPU is its first core, as cores are unlimited."""
    return np.where(pieces < 0, workload.accelerators, pieces)
