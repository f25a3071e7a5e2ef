"""What a placement costs at many sizes, without another capture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.assignment import Assignment
from fxpart.cost.kernels import ScheduleLog, schedule, schedule_log
from fxpart.cost.latency_source import LatencySource
from fxpart.cost.profile import OperatorProfile
from fxpart.cost.tables import CostTables, cost_tables, memory_tables
from fxpart.errors import SpecError
from fxpart.graph import FloatArray, IntArray
from fxpart.symbolic.graph import SymbolicGraph
from fxpart.symbolic.peak import check_assignment, peak_formulas
from fxpart.topology import Topology

__all__ = ["BATCH", "SweepTable", "sweep"]

BATCH = "batch"
"""The symbol that counts examples."""


@dataclass(frozen=True, eq=False, slots=True)
class SweepTable:
    """One row for each of K sizes, in the order in which they were given."""

    symbols: tuple[str, ...]
    sizes: IntArray
    """The value of each symbol, shape (K, k)."""
    latency_s: FloatArray
    """Simulated latency of the first input, shape (K,)."""
    throughput_per_s: FloatArray
    """Examples a second in a stream of inputs, shape (K,): inputs a second times the batch, or
    inputs a second where no symbol is ``batch``."""
    peak_bytes: IntArray
    """Shape (K, D)."""
    feasible: npt.NDArray[np.bool_]
    """Whether every device has memory enough, shape (K,)."""


def sweep(
    symbolic: SymbolicGraph,
    topology: Topology,
    latency: LatencySource,
    assignment: Assignment,
    sizes: Sequence[Mapping[str, int]],
) -> SweepTable:
    """Return latency, throughput and memory of `assignment` at each of `sizes`.

    The same as `evaluate` of a capture at each; those that do not fit are in the table too.
    O(rounds (n + reads)) for each size.

    Raises:
        SpecError: for no sizes or impossible ones, an assignment of another graph or to devices
            that are not there, and measured times, which hold for one size only.

    """
    if not sizes:
        raise SpecError("a sweep needs sizes; give at least one, such as {'batch': 8}")
    if isinstance(latency, OperatorProfile):
        raise SpecError(
            "times of an OperatorProfile hold for the size that was measured, not for others; use"
            " a roofline (LatencyModel) or a calibration"
        )
    check_assignment(symbolic, assignment, topology.n_devices)
    formulas = peak_formulas(symbolic, assignment, topology.n_devices)
    latency_s, inputs_per_s = np.zeros(len(sizes)), np.zeros(len(sizes))
    for index, each in enumerate(sizes):
        graph = symbolic.at(**each)
        costs = cost_tables(graph, memory_tables(graph), topology, latency)
        latency_s[index], busiest_s = _rounds(costs, assignment)
        inputs_per_s[index] = 1.0 / busiest_s if busiest_s > 0 else np.inf
    columns = {name: np.array([int(each[name]) for each in sizes]) for name in symbolic.symbols}
    peaks = np.column_stack([formula.at(**columns) for formula in formulas])
    return SweepTable(
        symbolic.symbols,
        np.column_stack(list(columns.values())),
        latency_s,
        inputs_per_s * columns.get(BATCH, 1),
        peaks,
        np.all(peaks <= topology.memory_bytes, axis=1),
    )


def _rounds(costs: CostTables, assignment: Assignment) -> tuple[float, float]:
    """Return the latency of the first input, and the load of the busiest device or link."""
    n, devices = costs.op_time_s.shape
    log = schedule_log(costs)
    device_s, link_s, first_s = np.zeros(devices), np.zeros((devices, devices)), 0.0
    for index in range(assignment.rounds):
        device_of = assignment.device_of_round(index)
        latency_s, count = schedule(costs, device_of, log)
        first_s = latency_s if index == 0 else first_s
        np.add.at(device_s, device_of, costs.op_time_s[np.arange(n), device_of])
        _add_transfers(link_s, log, count)
    return float(first_s), max(float(device_s.max()), float(link_s.max())) / assignment.rounds


def _add_transfers(link_s: FloatArray, log: ScheduleLog, count: int) -> None:
    """Add the time of each transfer to that of its link."""
    sent, sent_s = log.sent[:count], log.sent_s[:count]
    np.add.at(link_s, (sent[:, 1], sent[:, 2]), sent_s[:, 1] - sent_s[:, 0])
