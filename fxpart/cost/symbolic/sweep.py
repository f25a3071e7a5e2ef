"""Cost of a placement at many sizes, without another capture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import DataParallel
from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.reserve import rounded
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.topology import Topology
from fxpart.cost.all_reduce import BUCKET_BYTES, all_reduce_cost
from fxpart.cost.evaluate import evaluate
from fxpart.cost.holding import holding
from fxpart.cost.kernels import ScheduleLog, schedule, schedule_log
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.profile import OperatorProfile
from fxpart.cost.symbolic.op_times import of_one_size
from fxpart.cost.tables import CostTables, LatencySource
from fxpart.errors import SpecError

__all__ = ["BATCH", "Sums", "SweepTable", "sweep"]

BATCH = "batch"
"""The symbol that counts examples."""


@dataclass(frozen=True, eq=False, slots=True)
class Sums:
    """All-reduces among replicas that share a batch; see `fxpart.cost.all_reduce`."""

    partial: IntArray
    """The values to all-reduce, from `fxpart.cost.all_reduce.partial_values`."""
    replicas: DataParallel
    """The replicas; the placement is of one of them."""
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class SweepTable:
    """One row for each of K sizes, in the given order."""

    symbols: tuple[str, ...]
    sizes: IntArray
    """The value of each symbol, shape (K, k)."""
    latency_s: FloatArray
    """Simulated latency of the first input, shape (K,)."""
    throughput_per_s: FloatArray
    """Steady-state examples per second, shape (K,): inputs per second times the batch, or just
    inputs per second if there is no symbol ``batch``."""
    peak_bytes: IntArray
    """Shape (K, D)."""
    feasible: npt.NDArray[np.bool_]
    """Whether every device has enough memory, shape (K,)."""


def sweep(
    symbolic: SymbolicGraph,
    topology: Topology,
    latency: LatencySource,
    assignment: Assignment,
    sizes: Sequence[Mapping[str, int]],
    *,
    rounding_bytes: int = 1,
    sums: Sums | None = None,
) -> SweepTable:
    """Return the latency, throughput and memory of `assignment` at each of `sizes`.

    The results equal those of `evaluate` for a capture at each size; sizes that do not fit are
    included. O(rounds (n + reads)) per size.

    Args:
        symbolic: the captured model.
        topology: the devices, of one replica if there are several.
        latency: the source of operator times.
        assignment: the placement.
        sizes: a value of each symbol for each row; the batch is that of one replica.
        rounding_bytes: allocation granularity of every tensor.
        sums: all-reduces among replicas, included in the times; None for a single replica.

    Raises:
        SpecError: if there are no sizes or invalid ones, the assignment is for another graph or
            uses devices that do not exist, or times are measured, which are valid for one size
            only.

    """
    if not sizes:
        raise SpecError("a sweep needs sizes; give at least one, such as {'batch': 8}")
    if isinstance(latency, OperatorProfile):
        raise of_one_size(latency)
    assignment.check_for(symbolic.graph.n_ops, topology.n_devices)
    latency_s, inputs_per_s = np.zeros(len(sizes)), np.zeros(len(sizes))
    peaks = np.zeros((len(sizes), topology.n_devices), dtype=np.int64)
    for index, values in enumerate(sizes):
        graph = rounded(symbolic.at(**values), rounding_bytes)
        problem = make_problem(graph, topology, latency)
        peaks[index] = holding(problem.memory, assignment, topology.n_devices).peak_bytes
        latency_s[index], inputs_per_s[index] = _times(problem, assignment, sums)
    columns = {name: np.array([int(values[name]) for values in sizes]) for name in symbolic.symbols}
    return SweepTable(
        symbolic.symbols,
        np.column_stack(list(columns.values())),
        latency_s,
        inputs_per_s * columns.get(BATCH, 1),
        peaks,
        np.all(peaks <= topology.memory_bytes, axis=1),
    )


def _times(problem: Problem, assignment: Assignment, sums: Sums | None) -> tuple[float, float]:
    """Return the latency of the first input, and steady-state inputs per second."""
    if sums is not None:
        cost = all_reduce_cost(
            problem,
            assignment,
            evaluate(problem, assignment, search_bounds=False),
            partial=sums.partial,
            replicas=sums.replicas,
            bucket_bytes=sums.bucket_bytes,
        )
        return cost.latency_s, cost.throughput_per_s
    latency_s, busiest_s = _rounds(problem.costs, assignment)
    return latency_s, 1.0 / busiest_s if busiest_s > 0 else np.inf


def _rounds(costs: CostTables, assignment: Assignment) -> tuple[float, float]:
    """Return the latency of the first input, and the load of the busiest device, link or host."""
    n, devices = costs.op_time_s.shape
    log = schedule_log(costs)
    device_s, link_s, first_s = np.zeros(devices), np.zeros((devices, devices)), 0.0
    for index in range(assignment.rounds):
        device_of = assignment.device_of_round(index)
        latency_s, count = schedule(costs, device_of, log)
        first_s = latency_s if index == 0 else first_s
        np.add.at(device_s, device_of, costs.op_time_s[np.arange(n), device_of])
        _add_transfers(link_s, log, count)
    # As in `evaluate`, each replica has its own host.
    busiest_s = max(float(device_s.max()), float(link_s.max()), float(costs.issue_s[-1]))
    return float(first_s), busiest_s / assignment.rounds


def _add_transfers(link_s: FloatArray, log: ScheduleLog, count: int) -> None:
    """Add the time of each transfer to the load of its link."""
    sent, sent_s = log.sent[:count], log.sent_s[:count]
    np.add.at(link_s, (sent[:, 1], sent[:, 2]), sent_s[:, 1] - sent_s[:, 0])
