"""The simulated latency of a placement as a formula in the symbols of a captured model.

The event order is fixed: operators of a device run in graph order, transfers of a link in the order
of their producers, and a value is sent to its readers. So the latency is the longest path through
that partial order, and the time of a path is a sum over its operators and transfers. There are too
many paths to enumerate; the few that can be critical are found by simulating at the sizes of
interest.
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
from fxpart.cost.tables import CostTables, LatencySource, cost_tables, memory_tables
from fxpart.errors import SpecError
from fxpart.support.compiled import compiled, inlined

__all__ = ["LatencyFormula", "latency_formula", "latency_formulas"]


# The critical path of a simulated schedule.


@inlined
def _transfer_of(log: ScheduleLog, count: int, value: int, device: int) -> int:
    """Return which of the `count` transfers brings `value` to `device`."""
    # Values are sent as they are produced, so in ascending order.
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
    """Return the predecessor of each operator and transfer on its device or link, -1 for none.

    Transfers are numbered after the operators.
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
    """Return the operator or transfer whose result `op` waited for, -1 for none.

    Times are compared exactly, since a start is a copy of the finish that it waited for.
    """
    device = device_of[op]
    for i in range(t.read_start[op], t.read_start[op + 1]):
        value = t.reads[i]
        maker = t.producer[value]
        if maker < 0:
            continue
        if device_of[maker] == device:
            if log.finish_s[maker] == log.start_s[op]:
                return int(maker)
        elif log.arrival_s[value, device] == log.start_s[op]:
            return int(device_of.shape[0] + _transfer_of(log, count, value, device))
    return -1


@compiled
def _critical_path(
    t: CostTables, device_of: IntArray, log: ScheduleLog, count: int
) -> npt.NDArray[np.bool_]:
    """Return a mask of the operators and the `count` transfers on a longest path.

    Length n + count, the transfers last; `log` was filled by `fxpart.cost.kernels.schedule`. The
    path is traced back from the operator that ends last: an event that starts when another ends
    waited for that one. The order of events does not depend on times, so the sum along this path is
    a lower bound of the latency for any other times, and equal to it for these. O(n + reads).
    """
    n = device_of.shape[0]
    on_path = np.zeros(n + count, dtype=np.bool_)
    before = _came_before(log, count, device_of, t.op_time_s.shape[1])
    event = int(np.argmax(log.finish_s))
    while event >= 0:
        on_path[event] = True
        if event < n:
            if log.start_s[event] <= t.issue_s[event]:  # it waited only for the host
                break
            if before[event] >= 0 and log.finish_s[before[event]] == log.start_s[event]:
                event = before[event]
            else:
                event = _waited_for(t, device_of, log, count, event)
        else:
            maker = t.producer[log.sent[event - n, 0]]
            begin = log.sent_s[event - n, 0]
            event = maker if log.finish_s[maker] == begin else before[event]
    return on_path


EXACT = 1e-9
"""Relative difference allowed for sums of floats in another order."""


@dataclass(frozen=True, eq=False, slots=True)
class LatencyFormula:
    """A latency in seconds as a formula, with the sizes at which it was verified.

    At any other size of the same regime, it is a lower bound.
    """

    formula: MaxFormula
    checked_at: IntArray
    """Sizes at which it was compared with the simulation, shape (K, k)."""
    largest_error: float
    """Largest relative difference from the simulation at those sizes."""


@dataclass(frozen=True, eq=False, slots=True)
class _Placed:
    """The inputs that do not depend on the size."""

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
    """Return the latency as one formula, derived and verified at the sizes `at`.

    At each of these sizes it is below the latency simulated by `evaluate` by a relative difference
    of at most `tolerance`, and never above except for rounding. A larger tolerance gives a shorter
    formula. With replicas it is the latency of the first input. O((n + reads) M) per size.

    Raises:
        SpecError: if there are no sizes or invalid ones, the assignment is for another graph or
            uses devices that do not exist, times are measured, or the sizes span several regimes,
            for which `latency_formulas` gives a formula each.

    """
    formulas = latency_formulas(symbolic, topology, latency, assignment, at, tolerance=tolerance)
    if len(formulas) > 1:
        first, second = (
            _named(symbolic.symbols, formula.checked_at[0]) for formula in formulas[:2]
        )
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
    """Return a formula as of `latency_formula` for each regime of the sizes `at`, in their order.

    Usually there is one regime. There are several if the time of an operator is discontinuous: if
    it does nothing at some sizes, or, with a calibration, if a result becomes so large that a CPU
    has to map fresh memory for it.

    Raises:
        SpecError: as `latency_formula`, except for several regimes.

    """
    if not at:
        raise SpecError("a latency formula needs sizes to be found at; give at least one")
    if not 0 <= tolerance < 1:
        raise SpecError(f"tolerance={tolerance} must be at least 0 and below 1")
    assignment.check_for(symbolic.graph.n_ops, topology.n_devices)
    # This adds the constant monomial, needed for fixed times, if it is missing.
    symbolic, device_of = on_graph(symbolic, symbolic.graph), assignment.device_of
    times = op_times(symbolic, topology, latency, device_of)
    placed = _Placed(symbolic, topology, latency, device_of, times)
    sizes_by_regime: dict[bytes, list[Mapping[str, int]]] = {}
    for sizes in at:
        sizes_by_regime.setdefault(times.regime(symbolic.at(**sizes)), []).append(sizes)
    return tuple(
        _regime_formula(placed, sizes, max(tolerance, EXACT)) for sizes in sizes_by_regime.values()
    )


def _regime_formula(
    placed: _Placed, all_sizes: Sequence[Mapping[str, int]], tolerance: float
) -> LatencyFormula:
    """Return the formula for sizes of one regime.

    A path is added wherever the ones so far fall short. Each path is a lower bound everywhere, so
    sizes that are matched stay matched.
    """
    symbolic = placed.symbolic
    exponents = symbolic.exponents
    checked_at = np.array([[int(sizes[name]) for name in symbolic.symbols] for sizes in all_sizes])
    powers = np.prod(checked_at[:, None].astype(np.float64) ** exponents, axis=2)
    rows, simulated_s = np.zeros((1, len(exponents))), np.zeros(len(all_sizes))
    for index, sizes in enumerate(all_sizes):
        graph = symbolic.at(**sizes)
        costs = cost_tables(graph, memory_tables(graph), placed.topology, placed.latency)
        log = schedule_log(costs)
        simulated_s[index], count = schedule(costs, placed.device_of, log)
        if (rows @ powers[index]).max() < simulated_s[index] * (1 - tolerance):
            on_path = _critical_path(costs, placed.device_of, log, count)
            row = _path_row(placed, graph, powers[index], on_path, log)
            # The path begins when the host has launched its first operator.
            constant = int(np.flatnonzero(~exponents.any(axis=1))[0])
            row[constant] += costs.issue_s[np.flatnonzero(on_path)[0]]
            rows = np.vstack([rows, row])
    formula = max_formula(symbolic.symbols, exponents, rows, "s", symbolic.ranges)
    formula_s = formula.at(**dict(zip(symbolic.symbols, checked_at.T, strict=True)))
    error = np.abs(formula_s - simulated_s) / np.where(simulated_s > 0, simulated_s, 1.0)
    return LatencyFormula(formula, checked_at, float(error.max()))


def _path_row(
    placed: _Placed,
    graph: OpGraph,
    powers: FloatArray,
    chosen: npt.NDArray[np.bool_],
    log: ScheduleLog,
) -> FloatArray:
    """Return the time of a path as a polynomial, valid in the regime of `graph`; shape (M,)."""
    exponents, topology = placed.symbolic.exponents, placed.topology
    constant = int(np.flatnonzero(~exponents.any(axis=1))[0])
    on_path, sent_on_path = np.split(chosen, [graph.n_ops])
    row = placed.times.rows(graph, powers, constant)[on_path].sum(axis=0)
    value, source, target = log.sent[np.flatnonzero(sent_on_path)].T
    per_byte = 1.0 / topology.bytes_per_s[source, target]
    row += (placed.symbolic.coefficients["value_bytes"][value] * per_byte[:, None]).sum(axis=0)
    row[constant] += topology.latency_s[source, target].sum()
    coefficients: FloatArray = row
    return coefficients


def _named(symbols: tuple[str, ...], sizes: IntArray) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(symbols, sizes, strict=True))
