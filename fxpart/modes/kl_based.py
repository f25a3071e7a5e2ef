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
from fxpart.cost.incremental import make_progress
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.errors import SpecError
from fxpart.graph import IntArray
from fxpart.modes.local_search import SearchTables, improve
from fxpart.modes.single import devices_that_hold_all
from fxpart.modes.size_based import size_based
from fxpart.modes.units import atomic_units, module_units
from fxpart.partitions import partition_by_device
from fxpart.problem import Problem
from fxpart.topology import Topology

__all__ = ["KlBasedOptions", "kl_based"]

_MOST_PASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class KlBasedOptions:
    """How long `kl_based` tries."""

    max_passes: int = 8
    """Most passes over all units at each granularity; a pass that changes nothing is the last."""
    min_gain: float = 1e-4
    """Share of the latency that a change must save. Smaller gains are noise to the cost model, and
    each would add a partition or two; more of it gives fewer partitions."""

    def __post_init__(self) -> None:
        """Refuse a search that would do nothing."""
        if not 1 <= self.max_passes <= _MOST_PASSES:
            raise SpecError(
                f"mode.max_passes must be at least 1 and at most {_MOST_PASSES},"
                f" got {self.max_passes}"
            )
        if not 0 <= self.min_gain < 1:
            raise SpecError(f"mode.min_gain must be at least 0 and below 1, got {self.min_gain}")


def kl_based(problem: Problem, options: KlBasedOptions | None = None) -> Assignment:
    """Return a placement whose simulated latency is never above that of `size_based`.

    Where one device holds the whole model, the search starts from the fastest such device if that
    is better: devices that differ in speed cannot be left one operator at a time. Deterministic.
    Each candidate costs one simulation, O(n + reads).

    Raises:
        InfeasibleError: when `size_based` finds no start.

    """
    chosen = options or KlBasedOptions()
    start = size_based(problem)
    tables = _tables(problem, chosen)
    before, _ = schedule(problem.costs, start.device_of, tables.log)
    device_of, after = start.device_of, before
    for device in devices_that_hold_all(problem):
        alone = np.full(problem.graph.n_ops, device, dtype=np.int64)
        latency, _ = schedule(problem.costs, alone, tables.log)
        if latency < after:
            device_of, after = alone, latency
    for units in [*module_units(problem.graph), atomic_units(problem.graph)]:
        after = improve(tables, device_of, units, chosen.max_passes)
    return partition_by_device(problem.graph, device_of) if after < before else start


def _tables(problem: Problem, options: KlBasedOptions) -> SearchTables:
    return SearchTables(
        problem.costs,
        problem.memory,
        problem.topology.memory_bytes,
        make_progress(problem.costs),
        schedule_log(problem.costs),
        # Rounding alone must never keep the search going.
        max(options.min_gain, 1e-9),
        _kinds(problem.topology),
        np.zeros(problem.topology.n_devices, dtype=np.int64),
        np.empty(problem.graph.n_ops + 1, dtype=np.int64),
    )


def _kinds(topology: Topology) -> IntArray:
    """Return a number for each device; equal ones may be exchanged while both are idle."""
    specs = [
        (d.memory_bytes, d.memory_bandwidth_bytes_per_s, tuple(sorted(d.flops_per_s.items())))
        for d in topology.devices
    ]
    kinds: list[int] = []
    for device in range(topology.n_devices):
        alike = (
            other
            for other in range(device)
            if specs[other] == specs[device] and _linked_alike(topology, other, device)
        )
        kinds.append(next((kinds[other] for other in alike), device))
    return np.array(kinds, dtype=np.int64)


def _linked_alike(topology: Topology, a: int, b: int) -> bool:
    """Return whether exchanging the two devices leaves every link as it is."""
    for table in (topology.bytes_per_s, topology.latency_s):
        for rows in (table, table.T):
            exchanged = rows[a].copy()
            exchanged[[a, b]] = exchanged[[b, a]]
            if not np.array_equal(exchanged, rows[b]):
                return False
    return True
