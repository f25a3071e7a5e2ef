"""`mtkahypar`: partitions of the graph by the hypergraph partitioner Mt-KaHyPar.

Gottesbüren, Heuer, Maas, Sanders, Schlag: Scalable High-Quality Hypergraph Partitioning. ACM
Transactions on Algorithms 20(1), 2024, doi:10.1145/3626527. It is a baseline for comparison, and
provides starts for `optimal`. Vertices have a single weight, so it is run with balanced times and
with balanced memory.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.cost.blocking import device_loads_s, refuse_unfit, sample_latency_s
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement.search.load_tables import LoadTables, unit_tables
from fxpart.placement.search.steady_tables import joined_units
from fxpart.placement.search.throughput import cost_of
from fxpart.placement.size_based import size_based

__all__ = ["MtkahyparOptions", "is_installed", "mtkahypar", "parts_of"]

_VERTICES, _EDGES = 1e9, 1e8
"""Total weights of vertices and of hyperedges; the sums, times the number of parts that an edge
connects, must stay below 2^31."""


_IMBALANCES = (0.03, 0.1, 0.3)
"""Allowed imbalances, tried in turn, since a worse balance can be better if cuts are expensive."""
_SLOW = 16.0
"""Devices slower than the fastest by more than this factor, such as a host CPU, get no part."""


def is_installed() -> bool:
    """Return whether Mt-KaHyPar is installed."""
    return find_spec("mtkahypar") is not None


@dataclass(frozen=True, slots=True)
class MtkahyparOptions:
    """Options of the partitioner."""

    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options and the installation before a model is captured."""
        if not is_installed():
            raise SpecError("mode=mtkahypar needs mtkahypar; pip install 'fxpart[mtkahypar]'")
        if not 0 <= self.seed < 2**31:
            raise SpecError(f"mode.seed must be 0 to {2**31 - 1}, got {self.seed}")


def mtkahypar(problem: Problem, options: MtkahyparOptions | None = None) -> Assignment:
    """Return the best of several partitions for the problem's objective.

    If none fits, the placement of `size_based` is returned.

    Vertices are groups of operators that must share a device. Hyperedges are the outputs that
    connect them, weighted by transfer time on a link of the mean rate. Parts are balanced by time,
    in proportion to speed, and by weights, in proportion to memory, with different imbalances. Part
    i is on device i. Deterministic.

    Raises:
        InfeasibleError: if `size_based` finds no placement either.

    """
    chosen = options or MtkahyparOptions()
    if problem.workload is not None:
        tables, unit_of = unit_tables(problem.workload)
    else:
        _, unit_of = np.unique(problem.graph.group, return_inverse=True)
        unit_of = unit_of.astype(np.int64)
        tables = joined_units(problem, unit_of)
    soed = problem.workload is not None
    placed = [parts[unit_of] for parts in parts_of(tables, chosen, soed=soed)]
    costs = [_cost_s(problem, device_of) for device_of in placed]
    if not np.isfinite(costs).any():
        return size_based(problem)
    return partition_by_device(problem.graph, placed[int(np.argmin(costs))])


def parts_of(tables: LoadTables, options: MtkahyparOptions, *, soed: bool) -> list[IntArray]:
    """Return partitions of the units (U,) of a hypergraph into one part per device.

    Devices far slower than the fastest get none if the others can hold everything. With `soed`
    every part pays for a cut edge, otherwise all but one.
    """
    runs, room = np.isfinite(tables.time_s), tables.room_bytes.astype(np.float64)
    whole_s = np.maximum(tables.time_s[runs.all(axis=1)].sum(axis=0), 1e-300)
    used = whole_s <= _SLOW * whole_s.min()
    if room[used].sum() < tables.size_bytes.sum():
        used[:] = True
    devices = np.flatnonzero(used)
    times = np.where(runs, tables.time_s, np.inf).min(axis=1)
    room = np.minimum(room, max(1, tables.size_bytes.sum()))
    return [
        devices[_parts(tables, weights, shares[used], imbalance, options.seed, soed=soed)]
        for weights, shares in ((times, 1 / whole_s), (tables.size_bytes.astype(float), room))
        for imbalance in _IMBALANCES
        if weights.sum() > 0 and shares[used].sum() > 0
    ]


def _parts(
    tables: LoadTables,
    weights: FloatArray,
    shares: FloatArray,
    imbalance: float,
    seed: int,
    *,
    soed: bool,
) -> IntArray:
    """Return the part of each unit, with target weights in proportion to `shares` (D,)."""
    units, devices = len(weights), len(shares)
    if devices == 1 or units <= devices:
        return np.zeros(units, dtype=np.int64)
    import mtkahypar as partitioner

    # With this preset the result depends only on the seed, not on the number of threads.
    starter = partitioner.initialize(1, False)
    partitioner.set_seed(seed)
    context = starter.context_from_preset(partitioner.PresetType.DETERMINISTIC_QUALITY)
    objective = partitioner.Objective.SOED if soed else partitioner.Objective.KM1
    context.set_partitioning_parameters(devices, imbalance, objective)
    scaled = np.maximum(1, np.rint(weights / weights.sum() * _VERTICES)).astype(np.int64)
    block_limits = (
        np.ceil(shares / shares.sum() * (1 + imbalance) * scaled.sum()).astype(np.int64) + 1
    )
    context.set_individual_target_block_weights(block_limits.tolist())
    seconds = tables.output_s
    edge_weights = np.maximum(1, np.rint(seconds / max(seconds.sum(), 1e-300) * _EDGES))
    edges = np.split(tables.output_units, tables.output_start[1:-1])
    hypergraph = starter.create_hypergraph(
        context,
        units,
        len(seconds),
        [edge.tolist() for edge in edges[: len(seconds)]],
        scaled.tolist(),
        edge_weights.astype(np.int64).tolist(),
    )
    return np.array(hypergraph.partition(context).get_partition(), dtype=np.int64)


def _cost_s(problem: Problem, device_of: IntArray) -> float:
    """Return the objective, infinite if the placement does not fit."""
    workload = problem.workload
    if workload is None:
        sizes = problem.topology.memory_bytes
        if (peak_bytes(problem.memory, device_of, len(sizes)) > sizes).any():
            return np.inf
        return cost_of(problem, device_of)
    try:
        refuse_unfit(workload, device_of)
    except InfeasibleError:
        return np.inf
    if problem.objective == "throughput":
        return float(device_loads_s(workload, device_of).max())
    return sample_latency_s(workload, device_of)
