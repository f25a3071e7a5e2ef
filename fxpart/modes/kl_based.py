"""`kl_based`: start from `size_based`, then move and swap while the predicted latency falls.

After Kernighan and Lin: An efficient heuristic procedure for partitioning graphs. Bell System
Technical Journal 49(2), 1970, doi:10.1002/j.1538-7305.1970.tb01770.x; as torch's partitioner
applies it: for each operator in turn, the best move or swap that lowers the latency. Here whole
modules are moved first and single operators last, which finds what no single operator's move
would, and a change is kept only if every device still holds what it then has.
"""

from dataclasses import dataclass

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.errors import SpecError
from fxpart.modes.local_search import SearchTables, improve
from fxpart.modes.size_based import size_based
from fxpart.modes.units import atomic_units, module_units
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem

__all__ = ["KlBasedOptions", "kl_based"]


@dataclass(frozen=True, slots=True)
class KlBasedOptions:
    """How long `kl_based` tries."""

    max_passes: int = 8
    """Most passes over all units at each granularity; a pass that changes nothing is the last."""

    min_gain: float = 1e-4
    """Share of the latency that a change must save. Smaller gains are noise to the cost model, and
    each would add a partition or two."""

    def __post_init__(self) -> None:
        """Refuse a search that would do nothing."""
        if not 0 <= self.min_gain < 1:
            raise SpecError(f"mode.min_gain must be at least 0 and below 1, got {self.min_gain}")
        if self.max_passes < 1:
            raise SpecError(f"mode.max_passes must be at least 1, got {self.max_passes}")


def kl_based(problem: Problem, options: KlBasedOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is never above that of `size_based`.

    Deterministic. Each candidate costs one simulation, O(n + reads).

    Raises:
        InfeasibleError: when `size_based` finds no start.

    """
    chosen = options or KlBasedOptions()
    start = size_based(problem)
    device_of = start.device_of
    tables = SearchTables(
        problem.costs,
        problem.memory,
        problem.topology.memory_bytes,
        schedule_log(problem.costs),
        # Rounding alone must never keep the search going.
        max(chosen.min_gain, 1e-9),
        np.empty(problem.graph.n_ops + 1, dtype=np.int64),
    )
    before, _ = schedule(problem.costs, device_of, tables.log)
    after = before
    for units in [*module_units(problem.graph), atomic_units(problem.graph)]:
        after = improve(tables, device_of, units, chosen.max_passes)
    return partition_by_device(problem.graph, device_of) if after < before else start
