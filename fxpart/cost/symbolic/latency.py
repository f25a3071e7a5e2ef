"""The simulated latency of a placement as a formula in the symbols of a captured model.

What waits for what is fixed: operators of a device run in graph order, transfers of a link in the
order of their producers, and a value goes where it is read. So the latency is the longest of the
paths through that order, and the time of a path is a sum of operators and transfers. There are too
many paths to list; the few that are ever the longest are found by looking where it matters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph, on_graph
from fxpart.core.topology import Topology
from fxpart.cost.kernels import ScheduleLog, schedule, schedule_log
from fxpart.cost.symbolic.formula import MaxFormula, max_formula
from fxpart.cost.symbolic.op_times import OpTimes, op_times
from fxpart.cost.symbolic.peak import check_assignment
from fxpart.cost.tables import CostTables, LatencySource, cost_tables, memory_tables
from fxpart.errors import SpecError
from fxpart.support.compiled import compiled, inlined

__all__ = ["LatencyFormula", "latency_formula", "latency_formulas"]


# The operators and transfers that decide a simulated latency.


@inlined
def _transfer_of(log: ScheduleLog, count: int, value: int, device: int) -> int:
    """Return which of the `count` transfers brings `value` to `device`."""
    # Values are sent as they are made, so in the order of their numbers.
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if log.sent[middle, 0] < value:
            low = middle + 1
        else:
            high = middle
    while log.sent[low, 2] != device:
        low += 1
    return low


@inlined
def _came_before(log: ScheduleLog, count: int, device_of: IntArray, devices: int) -> IntArray:
    """Return for each operator, then each transfer, the one before it on its device or link.

    -1 for the first. Transfers are numbered after the operators.
    """
    n = device_of.shape[0]
    before = np.full(n + count, -1, dtype=np.int64)
    on_device = np.full(devices, -1, dtype=np.int64)
    on_link = np.full((devices, devices), -1, dtype=np.int64)
    for op in range(n):
        before[op] = on_device[device_of[op]]
        on_device[device_of[op]] = op
    for i in range(count):
        source, target = log.sent[i, 1], log.sent[i, 2]
        before[n + i] = on_link[source, target]
        on_link[source, target] = n + i
    return before


@inlined
def _waited_for(t: CostTables, device_of: IntArray, log: ScheduleLog, count: int, op: int) -> int:
    """Return the operator or transfer whose result `op` waited for; -1 if for none.

    Times are compared exactly: a start is a copy of the finish that it waited for.
    """
    here = device_of[op]
    for i in range(t.read_start[op], t.read_start[op + 1]):
        value = t.reads[i]
        maker = t.producer[value]
        if maker < 0:
            continue
        if device_of[maker] == here:
            if log.finish_s[maker] == log.start_s[op]:
                return int(maker)
        elif log.arrival_s[value, here] == log.start_s[op]:
            return int(device_of.shape[0] + _transfer_of(log, count, value, here))
    return -1


@compiled
def _critical_path(
    t: CostTables, device_of: IntArray, log: ScheduleLog, count: int
) -> npt.NDArray[np.bool_]:
    """Return which operators and which of the `count` transfers are on a longest path.

    Length n + count, the transfers last; `log` is what `fxpart.cost.kernels.schedule` has filled.
    From the operator that ends last back: what began as soon as another ended, waited for that
    one. What waits for what does not depend on times, so the sum of this path is a lower bound of
    the latency for any other times, and is the latency for these. O(n + reads).
    """
    n = device_of.shape[0]
    taken = np.zeros(n + count, dtype=np.bool_)
    before = _came_before(log, count, device_of, t.op_time_s.shape[1])
    here = int(np.argmax(log.finish_s))
    while here >= 0:
        taken[here] = True
        if here < n:
            if log.start_s[here] <= t.issue_s[here]:  # it waited for nothing but the host
                break
            if before[here] >= 0 and log.finish_s[before[here]] == log.start_s[here]:
                here = before[here]
            else:
                here = _waited_for(t, device_of, log, count, here)
        else:
            maker = t.producer[log.sent[here - n, 0]]
            begin = log.sent_s[here - n, 0]
            here = maker if log.finish_s[maker] == begin else before[here]
    return taken


EXACT = 1e-9
"""Share of the latency by which sums of floats in another order may differ."""


@dataclass(frozen=True, eq=False, slots=True)
class LatencyFormula:
    """A latency in seconds as a formula, and where it is known to be right.

    At any other size of the kind that it holds for, it is a lower bound.
    """

    formula: MaxFormula
    checked_at: IntArray
    """Sizes at which it was compared with the simulation, shape (K, k)."""
    largest_error: float
    """The most by which it is below or above the simulation there, as a share of that."""


@dataclass(frozen=True, eq=False, slots=True)
class _Placed:
    """What does not change with the size."""

    symbolic: SymbolicGraph
    topology: Topology
    latency: LatencySource
    device_of: IntArray
    times: OpTimes


def latency_formula(
    symbolic: SymbolicGraph,
    topology: Topology,
    latency: LatencySource,
    assignment: Assignment,
    at: Sequence[Mapping[str, int]],
    *,
    tolerance: float = EXACT,
) -> LatencyFormula:
    """Return the latency as one formula, found and checked at the sizes `at`.

    At each of them it is at most `tolerance` (a share) below what `evaluate` simulates, and never
    above it but for the rounding of floats. A larger tolerance makes a shorter formula. Replicas:
    the latency is that of the first input. O((n + reads) M) for each size.

    Raises:
        SpecError: for no sizes or impossible ones, an assignment of another graph or to devices
            that are not there, measured times, and sizes over which no single formula can hold;
            `latency_formulas` gives one for each range of those.

    """
    formulas = latency_formulas(symbolic, topology, latency, assignment, at, tolerance=tolerance)
    if len(formulas) > 1:
        first, second = (_named(symbolic.symbols, each.checked_at[0]) for each in formulas[:2])
        raise SpecError(
            f"between {first} and {second} an operator begins or ends to work, or a result becomes"
            f" too large for reuse: {len(formulas)} formulas; ask for sizes of one kind, or for"
            " latency_formulas"
        )
    return formulas[0]


def latency_formulas(
    symbolic: SymbolicGraph,
    topology: Topology,
    latency: LatencySource,
    assignment: Assignment,
    at: Sequence[Mapping[str, int]],
    *,
    tolerance: float = EXACT,
) -> tuple[LatencyFormula, ...]:
    """Return a formula for each kind of sizes in `at`, in order of the first size of each.

    As `latency_formula`. Mostly there is one kind. There are more where the time of an operator
    jumps: one that does nothing at some sizes and something at others, and, by a calibration,
    results that become so large that a CPU's memory for them is made anew.

    Raises:
        SpecError: as `latency_formula`, but for kinds of sizes.

    """
    if not at:
        raise SpecError("a latency formula needs sizes to be found at; give at least one")
    if not 0 <= tolerance < 1:
        raise SpecError(f"tolerance={tolerance} must be at least 0 and below 1")
    check_assignment(symbolic, assignment, topology.n_devices)
    # Fixed times need a constant, which this adds where there is none.
    symbolic, device_of = on_graph(symbolic, symbolic.graph), assignment.device_of
    times = op_times(symbolic, topology, latency, device_of)
    placed = _Placed(symbolic, topology, latency, device_of, times)
    kinds: dict[bytes, list[Mapping[str, int]]] = {}
    for sizes in at:
        kinds.setdefault(times.regime(symbolic.at(**sizes)), []).append(sizes)
    return tuple(_collected(placed, sizes, max(tolerance, EXACT)) for sizes in kinds.values())


def _collected(
    placed: _Placed, at: Sequence[Mapping[str, int]], tolerance: float
) -> LatencyFormula:
    """Return the formula for sizes of one kind.

    A path is added where those so far fall short. Each is a lower bound everywhere, so that a
    size that was met stays met.
    """
    symbolic = placed.symbolic
    exponents = symbolic.exponents
    checked_at = np.array([[int(sizes[name]) for name in symbolic.symbols] for sizes in at])
    powers = np.prod(checked_at[:, None].astype(np.float64) ** exponents, axis=2)
    rows, simulated_s = np.zeros((1, len(exponents))), np.zeros(len(at))
    for index, sizes in enumerate(at):
        graph = symbolic.at(**sizes)
        costs = cost_tables(graph, memory_tables(graph), placed.topology, placed.latency)
        log = schedule_log(costs)
        simulated_s[index], count = schedule(costs, placed.device_of, log)
        if (rows @ powers[index]).max() < simulated_s[index] * (1 - tolerance):
            taken = _critical_path(costs, placed.device_of, log, count)
            row = _path_row(placed, graph, powers[index], taken, log)
            # The path begins when the host has started its first operator.
            constant = int(np.flatnonzero(~exponents.any(axis=1))[0])
            row[constant] += costs.issue_s[np.flatnonzero(taken)[0]]
            rows = np.vstack([rows, row])
    formula = max_formula(symbolic.symbols, exponents, rows, "s", symbolic.ranges)
    found_s = formula.at(**dict(zip(symbolic.symbols, checked_at.T, strict=True)))
    error = np.abs(found_s - simulated_s) / np.where(simulated_s > 0, simulated_s, 1.0)
    return LatencyFormula(formula, checked_at, float(error.max()))


def _path_row(
    placed: _Placed,
    graph: OpGraph,
    powers: FloatArray,
    taken: npt.NDArray[np.bool_],
    log: ScheduleLog,
) -> FloatArray:
    """Return the polynomial of the time of a path, at sizes of the kind of `graph`; shape (M,)."""
    exponents, topology = placed.symbolic.exponents, placed.topology
    constant = int(np.flatnonzero(~exponents.any(axis=1))[0])
    on_path, sent_on_path = np.split(taken, [graph.n_ops])
    row = placed.times.rows(graph, powers, constant)[on_path].sum(axis=0)
    value, source, target = log.sent[np.flatnonzero(sent_on_path)].T
    per_byte = 1.0 / topology.bytes_per_s[source, target]
    row += (placed.symbolic.coefficients["value_bytes"][value] * per_byte[:, None]).sum(axis=0)
    row[constant] += topology.latency_s[source, target].sum()
    coefficients: FloatArray = row
    return coefficients


def _named(symbols: tuple[str, ...], sizes: IntArray) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(symbols, sizes, strict=True))
