"""Operator times as polynomials in the symbols: a piecewise roofline.

An operator takes a fixed time plus the maximum of two polynomials, of its FLOPs and of its bytes; a
calibration adds them. On a CPU, results too large for allocator reuse have an additional cost.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.topology import Topology
from fxpart.cost.calibration import FRESH_BYTES, Calibration, is_free, is_view
from fxpart.cost.roofline import LatencyModel, OperatorRates
from fxpart.cost.tables import LatencySource
from fxpart.errors import SpecError

__all__ = ["OpTimes", "of_one_size", "op_times"]


@dataclass(frozen=True, eq=False, slots=True)
class OpTimes:
    """The components of the time of each operator on the device where it is placed."""

    compute_s: FloatArray
    """Coefficients of the time of its FLOPs, or of all its work, shape (n, M)."""
    move_s: FloatArray
    """Coefficients of the time of its bytes if that can hide the other, else 0, shape (n, M)."""
    idle_s: FloatArray
    """Fixed time at sizes where it neither computes nor moves anything. Length n."""
    busy_s: FloatArray
    """Fixed time at other sizes. Length n."""
    fresh_s: FloatArray
    """Coefficients of the additional time of each value at sizes where it is large, shape (V,
    M)."""

    def regime(self, graph: OpGraph) -> bytes:
        """Return a key of the regime of `graph`, which is at some size.

        Within a regime all fixed times are the same, and the time of a path is a convex function of
        the monomials.
        """
        moves = (self.idle_s != self.busy_s) & is_view(graph)
        return np.packbits(moves).tobytes() + np.packbits(self._fresh(graph)).tobytes()

    def rows(self, graph: OpGraph, powers: FloatArray, constant: int) -> FloatArray:
        """Return the active polynomial of each operator's time at a size, shape (n, M).

        `graph` is at that size, `powers` are the values of the monomials there, and `constant` is
        the index of the constant monomial. At other sizes of the regime these are lower bounds.
        """
        computes = self.compute_s @ powers >= self.move_s @ powers
        rows: FloatArray = np.where(computes[:, None], self.compute_s, self.move_s)
        rows[:, constant] += np.where(is_view(graph), self.idle_s, self.busy_s)
        large = np.flatnonzero(self._fresh(graph))
        np.add.at(rows, graph.value_producer[large], self.fresh_s[large])
        return rows

    def _fresh(self, graph: OpGraph) -> npt.NDArray[np.bool_]:
        """Return which values are large enough for the additional cost. Length V."""
        large = (graph.value_alloc_bytes >= FRESH_BYTES) & (graph.value_producer >= 0)
        large &= self.fresh_s.any(axis=1)
        fresh: npt.NDArray[np.bool_] = large & ~is_view(graph)[graph.value_producer]
        return fresh


def of_one_size(latency: LatencySource) -> SpecError:
    """Return the error for measured times, which are valid for one size only."""
    return SpecError(
        f"times of an {type(latency).__name__} hold for the size that was measured, not for others;"
        " use a roofline (LatencyModel) or a calibration"
    )


def op_times(
    symbolic: SymbolicGraph, topology: Topology, latency: LatencySource, device_of: IntArray
) -> OpTimes:
    """Return the components of the times of operators on the devices `device_of`.

    Raises:
        SpecError: if times are measured, which are valid for one size only.

    """
    graph, sizes = symbolic.graph, symbolic.coefficients
    flops, moved = sizes["flops"], sizes["moved_bytes"]
    if isinstance(latency, LatencyModel):
        per_flop, per_byte = _of_model(graph, topology, latency, device_of)
        nothing, still = np.zeros(graph.n_ops), np.zeros(sizes["value_alloc_bytes"].shape)
        busy = np.full(graph.n_ops, latency.op_overhead_s)
        return OpTimes(flops * per_flop[:, None], moved * per_byte[:, None], nothing, busy, still)
    if not isinstance(latency, Calibration):
        raise of_one_size(latency)
    per_flop, per_byte = latency.s_per_unit(graph)
    takes = np.where(is_free(graph), 0.0, 1.0)
    work_s = (flops * per_flop[:, None] + moved * per_byte[:, None]) * takes[:, None]
    producer = graph.value_producer
    fresh = np.where(producer >= 0, takes[producer], 0.0) * latency.fresh_s_per_byte
    return OpTimes(
        work_s,
        np.zeros_like(work_s),
        takes * latency.view_s,
        takes * latency.overhead_s,
        sizes["value_alloc_bytes"] * fresh[:, None],
    )


def _of_model(
    graph: OpGraph, topology: Topology, model: LatencyModel, device_of: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return seconds per FLOP and per byte of each operator by a roofline."""
    rates = OperatorRates(graph, model)
    per_flop, per_byte = np.empty(graph.n_ops), np.empty(graph.n_ops)
    for device in np.unique(device_of).tolist():
        flops_per_s, bytes_per_s = rates.on(topology.devices[device])
        placed = device_of == device
        per_flop[placed] = 1.0 / flops_per_s[placed]
        per_byte[placed] = 1.0 / bytes_per_s[placed]
    return per_flop, per_byte
