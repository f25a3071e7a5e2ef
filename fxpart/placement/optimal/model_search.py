"""Searches of captured models: what every mode finds, then on from there, a step at a time."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, NotApplicableError
from fxpart.placement.optimal.anneal_steady import anneal_steady, steady_load_s
from fxpart.placement.optimal.coarsen import levels
from fxpart.placement.optimal.elite import Elite
from fxpart.placement.optimal.load_tables import LoadTables
from fxpart.placement.optimal.steady_tables import SteadyTables, joined_units, steady_tables
from fxpart.placement.search.local_search import SearchTables
from fxpart.placement.search.refine import (
    SearchOptions,
    kick,
    latency_of,
    search_tables,
)
from fxpart.placement.search.units import Units, atomic_units

__all__ = ["ModelSearch", "load_of", "toward_objective"]

_KICKS = 24
_HEATS = (0.03, 0.01, 0.003)
_COLD, _BLUNT, _KEEN = 1e-5, 8.0, 200.0
_STEPS_A_UNIT, _LEAST_STEPS, _MOST_STEPS = 40, 2_000, 60_000

Start = Callable[[Problem], Assignment]


def load_of(problem: Problem, device_of: IntArray) -> float:
    """Return the largest load of any device or link in s; `device_of` (n,)."""
    units = np.arange(problem.graph.n_ops, dtype=np.int64)
    return float(steady_load_s(steady_tables(problem, units), device_of))


def toward_objective(problem: Problem, placed: Assignment) -> Assignment:
    """Return what a search for latency found, made better for throughput where that is asked for.

    By one short annealing, always the same: the largest load is at most that of `placed`, and what
    fits does so still.
    """
    if problem.objective != "throughput":
        return placed
    unit_of = _unit_of(problem)
    search = _Steady(problem, unit_of, joined_units(problem, unit_of))
    device_of = search.annealed(placed.device_of, placed.device_of, 0.01, 0)
    return partition_by_device(problem.graph, device_of)


def _unit_of(problem: Problem) -> IntArray:
    _, unit_of = np.unique(problem.graph.group, return_inverse=True)
    return unit_of.astype(np.int64)


@dataclass(eq=False, slots=True)
class _Steady:
    """Anneals a placement level by level for the least largest load."""

    problem: Problem
    unit_of: IntArray
    joined: LoadTables
    watched: bool = field(init=False)

    def __post_init__(self) -> None:
        """Find out whether memory could ever be short: if all of everything fits each device."""
        m, sizes = self.problem.memory, self.problem.topology.memory_bytes
        everything = m.weight_bytes.sum() + m.alloc_bytes.sum() + m.value_bytes.sum()
        self.watched = bool(everything > sizes.min())

    def annealed(self, device_of: IntArray, labels: IntArray, heat: float, seed: int) -> IntArray:
        """Return the best met from `device_of` on; what differs in `labels` is not contracted."""
        units = len(self.joined.size_bytes)
        of_unit = np.empty(units, dtype=np.int64)
        of_unit[self.unit_of] = labels
        target = 8 * len(self.joined.room_bytes)
        maps = [np.arange(units, dtype=np.int64)]
        for _, cluster_of in levels(self.joined, of_unit, target, seed):
            maps.append(cluster_of[maps[-1]])
        device_of = device_of.copy()
        for level in range(len(maps) - 1, -1, -1):
            cluster = maps[level][self.unit_of]
            tables = steady_tables(self.problem, cluster)
            home = np.empty(len(tables.time_s), dtype=np.int64)
            home[cluster] = device_of
            self._level(tables, home, heat if level == len(maps) - 1 else heat / 3, seed + level)
            device_of = home[cluster]
        return device_of

    def _level(self, tables: SteadyTables, home: IntArray, heat: float, seed: int) -> None:
        steps = min(max(_STEPS_A_UNIT * len(home), _LEAST_STEPS), _MOST_STEPS)
        anneal_steady(
            tables,
            self.problem.memory,
            self.problem.topology.memory_bytes,
            self.watched,
            home,
            seed,
            steps,
            heat,
            _COLD,
            _BLUNT,
            _KEEN,
        )


@dataclass(eq=False, slots=True)
class ModelSearch:
    """A search for the objective of a problem. The same for a seed."""

    problem: Problem
    starts: Sequence[Start]
    """Modes that are asked in the first steps, one each."""
    seed: int = 0
    elite: Elite = field(default_factory=Elite)
    """The best placements met and their costs, the best first."""
    _round: int = 0
    _steady: _Steady | None = None
    _kicked: tuple[SearchTables, Units] | None = None

    @property
    def best_s(self) -> float:
        """The cost of the best placement; infinite before there is one."""
        return self.elite.best_s

    @property
    def is_exhausted(self) -> bool:
        """Whether no mode has found a placement: there is none to go on from."""
        return self._round >= len(self.starts) and not self.elite

    def take(self, device_of: IntArray) -> None:
        """Start from a placement too, if it fits."""
        sizes = self.problem.topology.memory_bytes
        if (peak_bytes(self.problem.memory, device_of, len(sizes)) <= sizes).all():
            cost = load_of if self.problem.objective == "throughput" else latency_of
            self.elite.keep(cost(self.problem, device_of), device_of)

    def round(self) -> None:
        """Ask the next mode, or try once more from what is there."""
        number, self._round = self._round, self._round + 1
        if number < len(self.starts):
            with suppress(InfeasibleError, NotApplicableError):
                self.take(self.starts[number](self.problem).device_of)
        elif self.elite:
            tried = number - len(self.starts)
            seed = self.seed * 1_000_003 + tried * 64 + 1
            rank = 0 if tried % 2 == 0 else (tried // 2) % len(self.elite)
            if self.problem.objective == "throughput":
                self._rebalance(rank, tried, seed)
            else:
                self._kick(rank, seed)

    def _kick(self, rank: int, seed: int) -> None:
        if self._kicked is None:
            tables = search_tables(self.problem, SearchOptions(min_gain=0.0))
            self._kicked = tables, atomic_units(self.problem.graph)
        tables, units = self._kicked
        device_of = self.elite[rank].copy()
        kick(tables, device_of, units, _KICKS, 4, seed)
        self.take(device_of)

    def _rebalance(self, rank: int, tried: int, seed: int) -> None:
        if self._steady is None:
            unit_of = _unit_of(self.problem)
            self._steady = _Steady(self.problem, unit_of, joined_units(self.problem, unit_of))
        start = labels = self.elite[rank]
        if tried % 3 == 2 and len(self.elite) > 1:
            other = self.elite[1 + tried // 3 % (len(self.elite) - 1)]
            labels = start * self.problem.topology.n_devices + other
        self.take(self._steady.annealed(start, labels, _HEATS[tried % 3], seed))
