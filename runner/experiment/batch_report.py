"""The cost of a plan at other batch sizes, from one capture: formulas, limits and a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.reserve import rounded
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.cost.holding import holding
from fxpart.cost.problem import Problem
from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.cost.symbolic.latency import LatencyFormula, latency_formulas
from fxpart.cost.symbolic.limits import MOST, largest_batch, smallest_memory
from fxpart.cost.symbolic.peak import cost_formula, peak_formulas
from fxpart.cost.symbolic.sweep import BATCH, Sums, SweepTable, sweep
from fxpart.cost.tables import LatencySource, memory_tables
from fxpart.errors import InfeasibleError
from runner.output.units import GIB, format_size

__all__ = ["BatchReport", "batch_line", "batch_metrics", "batch_report"]


@dataclass(frozen=True, eq=False, slots=True)
class BatchReport:
    """One plan at other sizes. Batch sizes are those of one replica unless stated otherwise."""

    sizes: dict[str, int]
    """The sizes that the plan was made for, by symbol."""
    replicas: int
    rounding_bytes: int
    """The allocator rounds tensors up to multiples of this."""
    peaks: tuple[MaxFormula, ...]
    """Bytes of tensors on each device, before the allocator rounds them."""
    flops: MaxFormula
    """FLOPs of the whole model."""
    latencies: tuple[LatencyFormula, ...]
    """Latency without all-reduces, a formula for each range of sizes; usually one."""
    max_batch_size: int
    """The largest batch that fits the devices, rounding included; 0 if none does."""
    no_larger: str | None
    """Why the search ended, if `max_batch_size` is not limited by memory."""
    smallest_memory_bytes: tuple[int, ...]
    """Memory each device needs for tensors at `sizes`, rounding included."""
    table: SweepTable
    """A row per batch size, with rounding and all-reduces."""
    trains: bool = False
    """Whether this is a training step, which starts only after the previous one ends."""

    @property
    def max_global_batch_size(self) -> int:
        """The largest batch, over all replicas."""
        return self.max_batch_size * self.replicas

    @property
    def batches(self) -> IntArray:
        """The batch size of each row of `table`, over all replicas."""
        return self.table.sizes[:, self.table.symbols.index(BATCH)] * self.replicas

    @property
    def examples_per_s(self) -> FloatArray:
        """The throughput of each row of `table`, over all replicas."""
        if not self.trains:
            return self.table.throughput_per_s * self.replicas
        with np.errstate(divide="ignore"):
            return self.batches / self.table.latency_s


def batch_report(
    symbolic: SymbolicGraph,
    problem: Problem,
    assignment: Assignment,
    *,
    latency: LatencySource,
    sizes: dict[str, int],
    rounding_bytes: int,
    max_batch: int,
    sums: Sums | None = None,
) -> BatchReport:
    """Return the cost of `assignment` at batch sizes from 1 to `max_batch`, and its limits.

    Args:
        symbolic: the placed graph, with symbolic sizes.
        problem: the same graph at `sizes`.
        assignment: the placement of that problem.
        latency: the source of operator times.
        sizes: a value for each symbol.
        rounding_bytes: the multiple that the allocator rounds to.
        max_batch: the largest batch of the sweep.
        sums: the all-reduces of replicas that share a batch; None for one replica.

    Raises:
        SpecError: if times are measured, and so hold for one size only.

    """
    topology = problem.topology
    peaks = peak_formulas(symbolic, assignment, topology.n_devices)
    fixed = {name: size for name, size in sizes.items() if name != BATCH}
    low, high = peaks[0].range_of(BATCH)
    top = max_batch if high is None else min(max_batch, high)
    sizes_of_rows = [{**fixed, BATCH: batch} for batch in range(low, max(top, low) + 1)]
    rounding = _Rounding(symbolic, assignment, topology.n_devices, rounding_bytes)
    largest = _largest(peaks, topology.memory_bytes.tolist(), fixed, rounding)
    return BatchReport(
        sizes=sizes,
        replicas=sums.replicas.n_replicas if sums else 1,
        rounding_bytes=rounding_bytes,
        peaks=peaks,
        flops=cost_formula(symbolic, "flops"),
        latencies=latency_formulas(symbolic, topology, latency, assignment, sizes_of_rows),
        max_batch_size=largest,
        no_larger=_no_larger(largest, high),
        smallest_memory_bytes=rounding.peak_bytes(sizes)
        if rounding_bytes > 1
        else smallest_memory(peaks, **sizes),
        table=sweep(
            symbolic,
            topology,
            latency,
            assignment,
            sizes_of_rows,
            rounding_bytes=rounding_bytes,
            sums=sums,
        ),
        trains=bool(problem.graph.is_backward.any()),
    )


def _no_larger(largest: int, captured_to: int | None) -> str | None:
    """Return why the search ended at `largest`; None if memory is the limit."""
    if largest == captured_to:
        return "the model was captured up to there"
    return "the search ends there" if largest == MOST else None


@dataclass(frozen=True, eq=False, slots=True)
class _Rounding:
    """Peaks of rounded sizes, which are not polynomials."""

    symbolic: SymbolicGraph
    assignment: Assignment
    n_devices: int
    multiple: int

    def peak_bytes(self, sizes: dict[str, int]) -> tuple[int, ...]:
        graph = rounded(self.symbolic.at(**sizes), self.multiple)
        holdings = holding(memory_tables(graph), self.assignment, self.n_devices)
        return tuple(holdings.peak_bytes.tolist())


def _largest(
    peaks: Sequence[MaxFormula], limits: list[int], fixed: dict[str, int], rounding: _Rounding
) -> int:
    """Return the largest batch whose rounded peaks fit; 0 if none does."""
    try:
        high = largest_batch(peaks, limits, **fixed)
    except InfeasibleError:
        return 0
    # Rounding only adds bytes: no batch above `high` fits with it.
    first, _ = peaks[0].range_of(BATCH)
    low = first - 1
    while low < high:
        middle = (low + high + 1) // 2
        needed = rounding.peak_bytes({**fixed, BATCH: middle})
        if all(need <= limit for need, limit in zip(needed, limits, strict=True)):
            low = middle
        else:
            high = middle - 1
    return low if low >= first else 0


def batch_metrics(report: BatchReport) -> dict[str, float]:
    """Return the metrics of a report by name."""
    return {
        "max_batch_size": float(report.max_global_batch_size),
        "smallest_device_memory_gib": max(report.smallest_memory_bytes) / GIB,
    }


def batch_line(report: BatchReport) -> str:
    """Return a line with the limits."""
    needed = max(report.smallest_memory_bytes)
    batch = report.sizes[BATCH] * report.replicas
    largest = str(report.max_global_batch_size)
    if report.no_larger:
        largest = f"at least {largest} ({report.no_larger})"
    return (
        f"largest whose tensors fit this plan {largest}; batch {batch} needs {format_size(needed)}"
        " for tensors on its fullest device"
    )
