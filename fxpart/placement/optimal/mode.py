"""`optimal`: the best placement found within a time limit, with a lower bound."""

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.bounds import best_bounds
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError
from fxpart.placement.cost_aware import cost_aware
from fxpart.placement.equal_layers import equal_layers
from fxpart.placement.infeasible import does_not_fit
from fxpart.placement.kl_based import kl_based
from fxpart.placement.mtkahypar import is_installed, mtkahypar
from fxpart.placement.optimal.model_search import ModelSearch
from fxpart.placement.pipeline import pipeline
from fxpart.placement.published.search import KnownBound, Proof, Search, begun
from fxpart.placement.search.full_evaluations import BY_WHOLE, bound_of
from fxpart.placement.single import single
from fxpart.placement.size_based import size_based

__all__ = ["WATCHER", "OptimalOptions", "Progress", "Search", "optimal"]

STARTS = (size_based, single, equal_layers, pipeline, cost_aware, kl_based)
"""Modes run first, fast ones before slow ones in case time is short; then `mtkahypar` if
installed."""
UNITS = {"memory": "B", "energy": "J"}
_ROUNDING = 1e-9
_PROVING = 0.25
"""Share of the time spent on improving the bound."""
_MOST_S, _MOST_STEPS = 1e7, 10**9


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a search."""

    seconds: float
    """Time since the start."""
    step: int
    best_s: float
    """Objective of the best placement so far: latency or largest load, or for other objectives the
    value in their unit."""
    bound_s: float
    """Lower bound of the objective."""
    bound_by: str
    """Name of the proof of the bound."""
    unit: str = "s"
    """Unit of both: ``s``, ``B`` for memory or ``J`` for energy."""
    is_interrupted: bool = False
    """Whether Ctrl-C has ended the search."""

    @property
    def gap(self) -> float:
        """The best relative to the bound, minus one; infinite without a bound."""
        return max(0.0, self.best_s / self.bound_s - 1.0) if self.bound_s > 0 else math.inf


WATCHER: ContextVar[Callable[[Progress], None] | None] = ContextVar("watcher", default=None)
"""Called at the start, at each improvement and at the end."""


@dataclass(frozen=True, slots=True)
class OptimalOptions:
    """Limits of the search."""

    time_limit_s: float = 10.0
    """Seconds after which the best placement so far is returned, once the current step is done."""
    steps: int | None = None
    """Number of steps instead of a time limit, which makes the result deterministic."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        if not 0 < self.time_limit_s <= _MOST_S:
            raise SpecError(
                f"mode.time_limit_s must be above 0 and at most {_MOST_S:.0e},"
                f" got {self.time_limit_s}"
            )
        steps = self.steps
        if steps is not None and (type(steps) is not int or not 1 <= steps <= _MOST_STEPS):
            raise SpecError(f"mode.steps must be 1 to {_MOST_STEPS}, or null, got {steps!r}")
        if not 0 <= self.seed < 2**31:
            raise SpecError(f"mode.seed must be 0 to {2**31 - 1}, got {self.seed}")


def optimal(problem: Problem, options: OptimalOptions | None = None) -> Assignment:
    """Return the best placement found for the problem's objective within the limits.

    The search also ends when the best meets the bound, and on Ctrl-C with the best so far. It is
    deterministic for a seed and a number of steps, with the same packages installed.

    Raises:
        InfeasibleError: if no placement was found that fits.

    """
    chosen = options or OptimalOptions()
    begin = time.monotonic()
    search, device_of, proof = _begun(problem, chosen.seed)
    _run(search, proof, chosen, begin, problem.objective)
    if not math.isfinite(search.best_s):
        raise does_not_fit(problem)
    return partition_by_device(problem.graph, device_of())


def _run(
    search: Search, proof: Proof, options: OptimalOptions, begin: float, objective: str
) -> None:
    watcher, unit = WATCHER.get(), UNITS.get(objective, "s")
    step, shown_s, proving_s = 0, math.inf, 0.0

    def tell(*, is_interrupted: bool = False) -> None:
        if watcher:
            seconds, best_s = time.monotonic() - begin, search.best_s
            watcher(
                Progress(seconds, step, best_s, proof.bound_s, proof.name, unit, is_interrupted)
            )

    def prove() -> float:
        """Try to improve the bound if its share of time is not used up; return the time spent."""
        since, bound_s, limit_s = time.monotonic(), proof.bound_s, math.inf
        if options.steps is None:
            limit_s = _PROVING * (since - begin) - proving_s
        if not proof.is_done and limit_s > 0:
            proof.step(limit_s)
            if proof.bound_s > bound_s:
                tell()
        return time.monotonic() - since

    def improve() -> None:
        nonlocal step, shown_s, proving_s
        tell()
        while search.best_s > proof.bound_s * (1 + proof.tolerance):
            if options.steps is not None:
                if step >= options.steps:
                    break
            elif time.monotonic() - begin >= options.time_limit_s:
                break
            if search.is_exhausted:
                break
            search.round()
            step += 1
            if search.best_s < shown_s * (1 - _ROUNDING):
                shown_s = search.best_s
                tell()
            proving_s += prove()
        tell()

    try:
        improve()
    except KeyboardInterrupt:
        if not math.isfinite(search.best_s):
            raise
        tell(is_interrupted=True)


def _begun(problem: Problem, seed: int) -> tuple[Search, Callable[[], IntArray], Proof]:
    """Return an initialized search, a getter of its best placement (n,), and a bound."""
    workload = problem.workload
    if workload is None:
        starts = (*STARTS, mtkahypar) if is_installed() else STARTS
        search = ModelSearch(problem, starts, seed)
        search.round()  # ensures that there is a placement to return
        bounds = best_bounds(problem)
        if problem.objective in BY_WHOLE:
            known = KnownBound(*bound_of(problem, bounds.latency_s))
            return search, lambda: search.elite[0], known
        bound_s = bounds.latency_s if problem.objective == "latency" else bounds.load_s
        return search, lambda: search.elite[0], KnownBound(bound_s, bounds.name)
    return begun(problem, workload, seed)
