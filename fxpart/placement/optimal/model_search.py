"""Searches for captured models: run every mode, then improve the results step by step."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.kernels import schedule_log
from fxpart.cost.least_placement import least_placement
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.errors import InfeasibleError, NotApplicableError
from fxpart.placement.search.anneal_latency import anneal_latency
from fxpart.placement.search.elite import Elite
from fxpart.placement.search.full_evaluations import BY_WHOLE, annealed_whole
from fxpart.placement.search.local_search import SearchTables
from fxpart.placement.search.refine import (
    SearchOptions,
    kick,
    search_tables,
)
from fxpart.placement.search.throughput import Annealer, cost_of
from fxpart.placement.search.units import Units, atomic_units, working_units
from fxpart.placement.single import devices_that_hold_all

__all__ = ["ModelSearch"]

_KICKS = 24
_MOST_STEPS, _MOST_WORK = 150_000, 60_000_000
"""Of annealing where memory is short: steps, and steps times operators, some two seconds."""
_COOL = 0.1
"""Of `_HEATS`, that of latency: a plan that fits is soon lost, and seldom found again."""
_HEATS = (0.03, 0.01, 0.003)

Start = Callable[[Problem], Assignment]


@dataclass(eq=False, slots=True)
class ModelSearch:
    """A search for the objective of a problem. Deterministic for a seed."""

    problem: Problem
    starts: Sequence[Start]
    """Modes run in the first steps, one each."""
    seed: int = 0
    elite: Elite = field(default_factory=Elite)
    """The best placements found with their costs, best first."""
    _round: int = 0
    _is_short: bool = False
    _annealer: Annealer | None = None
    _kicked: tuple[SearchTables, Units] | None = None

    @property
    def best_s(self) -> float:
        """The cost of the best placement; infinite if there is none yet."""
        return self.elite.best_s

    @property
    def is_exhausted(self) -> bool:
        """Whether no mode has found a placement to continue from."""
        return self._round >= len(self.starts) and not self.elite

    def take(self, device_of: IntArray) -> None:
        """Add a starting placement if it fits."""
        sizes = self.problem.topology.memory_bytes
        if (peak_bytes(self.problem.memory, device_of, len(sizes)) <= sizes).all():
            self.elite.keep(cost_of(self.problem, device_of), device_of)

    def round(self) -> None:
        """Run the next mode, or one round of improvement."""
        number, self._round = self._round, self._round + 1
        optimum = None
        if number == 0 and self.problem.objective in BY_TIME:
            optimum = least_placement(self.problem, self.problem.objective)
        if optimum is not None and optimum.is_proven and not optimum.fits_none:
            self.take(optimum.device_of)
        elif number < len(self.starts):
            with suppress(InfeasibleError, NotApplicableError):
                self.take(self.starts[number](self.problem).device_of)
        elif self.elite:
            tried = number - len(self.starts)
            seed = self.seed * 1_000_003 + tried * 64 + 1
            rank = 0 if tried % 2 == 0 else (tried // 2) % len(self.elite)
            if self.problem.objective in BY_WHOLE:
                heat = _HEATS[tried % 3]
                self.take(annealed_whole(self.problem, self.elite[rank], heat, seed))
            elif self.problem.objective == "throughput":
                self._rebalance(rank, tried, seed)
            else:
                self._speed_up(tried, seed)

    def _speed_up(self, tried: int, seed: int) -> None:
        """Kick a placement; in every other step anneal one, where no device holds the model."""
        if tried == 0:
            self._is_short = not devices_that_hold_all(self.problem)
        if self._is_short and tried % 2 == 1:
            self._anneal((tried // 2) % min(2, len(self.elite)), tried, seed)
        else:
            self._kick(0 if tried % 2 == 0 else (tried // 2) % len(self.elite), seed)

    def _anneal(self, rank: int, tried: int, seed: int) -> None:
        costs, device_of = self.problem.costs, self.elite[rank].copy()
        units = working_units(self.problem.graph, costs.op_time_s.max(axis=1) > 0)
        anneal_latency(
            costs,
            self.problem.memory,
            schedule_log(costs),
            self.problem.topology.memory_bytes,
            units,
            device_of,
            seed,
            min(_MOST_STEPS, _MOST_WORK // len(device_of) + 1),
            _COOL * _HEATS[tried // 2 % 3],
        )
        self.take(device_of)

    def _kick(self, rank: int, seed: int) -> None:
        if self._kicked is None:
            tables = search_tables(self.problem, SearchOptions(min_gain=0.0))
            self._kicked = tables, atomic_units(self.problem.graph)
        tables, units = self._kicked
        device_of = self.elite[rank].copy()
        kick(tables, device_of, units, _KICKS, 4, seed=seed)
        self.take(device_of)

    def _rebalance(self, rank: int, tried: int, seed: int) -> None:
        if self._annealer is None:
            self._annealer = Annealer(self.problem)
        start = labels = self.elite[rank]
        if tried % 3 == 2 and len(self.elite) > 1:
            other = self.elite[1 + tried // 3 % (len(self.elite) - 1)]
            labels = start * self.problem.topology.n_devices + other
        self.take(self._annealer.annealed(start, labels, _HEATS[tried % 3], seed))
