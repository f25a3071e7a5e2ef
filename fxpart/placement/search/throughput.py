"""Objectives other than latency; the largest load is minimized by multilevel annealing."""

from dataclasses import dataclass, field

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.problem import Problem
from fxpart.placement.search.anneal_steady import anneal_steady, steady_load_s
from fxpart.placement.search.coarsen import levels
from fxpart.placement.search.full_evaluations import BY_WHOLE, annealed_whole, value_of
from fxpart.placement.search.load_tables import LoadTables
from fxpart.placement.search.refine import latency_of
from fxpart.placement.search.steady_tables import SteadyTables, joined_units, steady_tables
from fxpart.placement.single import devices_that_hold_all

__all__ = ["Annealer", "cost_of", "load_of", "toward_objective"]

_COLD, _BLUNT, _KEEN = 1e-5, 8.0, 200.0
_STEPS_A_UNIT, _LEAST_STEPS, _MOST_STEPS = 40, 2_000, 60_000


def load_of(problem: Problem, device_of: IntArray) -> float:
    """Return the largest load of any device or link, or of the host, in s; `device_of` (n,)."""
    units = np.arange(problem.graph.n_ops, dtype=np.int64)
    steady_s = float(steady_load_s(steady_tables(problem, units), device_of))
    return max(steady_s, float(problem.costs.issue_s[-1]))


def cost_of(problem: Problem, device_of: IntArray) -> float:
    """Return the problem's objective in s, bytes or J; `device_of` has shape (n,)."""
    if problem.objective in BY_WHOLE:
        return value_of(problem, device_of)
    return (load_of if problem.objective == "throughput" else latency_of)(problem, device_of)


def toward_objective(problem: Problem, placed: Assignment) -> Assignment:
    """Improve the result of a latency search for the problem's objective.

    This is one short, deterministic annealing run: the cost does not increase, and a placement that
    fits still fits.
    """
    if problem.objective == "latency":
        return placed
    if problem.objective in BY_WHOLE:
        alone = devices_that_hold_all(problem)
        whole = [np.full(problem.graph.n_ops, device, dtype=np.int64) for device in alone]
        start = min([placed.device_of, *whole], key=lambda device_of: value_of(problem, device_of))
        device_of = annealed_whole(problem, start, 0.1, 0)
        return partition_by_device(problem.graph, device_of)
    device_of = Annealer(problem).annealed(placed.device_of, placed.device_of, 0.01, 0)
    return partition_by_device(problem.graph, device_of)


@dataclass(eq=False, slots=True)
class Annealer:
    """Multilevel annealing of the largest load."""

    problem: Problem
    _unit_of: IntArray = field(init=False)
    _joined: LoadTables = field(init=False)
    _watched: bool = field(init=False)

    def __post_init__(self) -> None:
        """Determine whether memory can bind, that is if some device cannot hold everything."""
        _, unit_of = np.unique(self.problem.graph.group, return_inverse=True)
        self._unit_of = unit_of.astype(np.int64)
        self._joined = joined_units(self.problem, self._unit_of)
        m, sizes = self.problem.memory, self.problem.topology.memory_bytes
        everything = m.weight_bytes.sum() + m.alloc_bytes.sum() + m.value_bytes.sum()
        self._watched = bool(everything > sizes.min())

    def annealed(self, device_of: IntArray, labels: IntArray, heat: float, seed: int) -> IntArray:
        """Return the best found from `device_of`, contracting only units with equal `labels`."""
        units = len(self._joined.size_bytes)
        of_unit = np.empty(units, dtype=np.int64)
        of_unit[self._unit_of] = labels
        target = 8 * len(self._joined.room_bytes)
        maps = [np.arange(units, dtype=np.int64)]
        for _, cluster_of in levels(self._joined, of_unit, target, seed):
            maps.append(cluster_of[maps[-1]])
        device_of = device_of.copy()
        for level in range(len(maps) - 1, -1, -1):
            cluster = maps[level][self._unit_of]
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
            self._watched,
            home,
            seed,
            steps,
            heat,
            _COLD,
            _BLUNT,
            _KEEN,
        )
