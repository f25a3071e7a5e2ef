"""A model as a row of units between which it may be cut into pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import MOST_KEPT_GRAPHS, FloatArray, IntArray, OpGraph
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables, memory_tables
from fxpart.errors import SpecError
from fxpart.placement.search.units import stretch_of_operators
from fxpart.placement.stages.repeated import repeated_units
from fxpart.placement.stages.stretch_bytes import Stretches, UnitTables, no_bytes, stretch_scratch

__all__ = ["StageLine", "stage_line"]


@dataclass(frozen=True, eq=False, slots=True)
class StageLine:
    """The U units of a model's forward, in graph order; each group is within one unit.

    A stage is a stretch of units. In a training step a backward operator belongs to the unit of its
    forward operator. Cut e, for 0 < e < U, is before unit e.
    """

    unit_of: IntArray
    """Unit of each operator. Length n."""
    first_op: IntArray
    """First operator of each unit. Length U."""
    last_op: IntArray
    """No operator of a stretch that ends at cut e comes after this one. Length U + 1."""
    load_before_s: FloatArray
    """Time of all units before each cut, on each device, in seconds. Shape (D, U + 1)."""
    crossing_bytes: IntArray
    """Bytes of the values that cross each cut; 0 at both ends. Length U + 1."""
    passing_bytes: IntArray
    """Bytes that cross each cut forwards (first row) and backwards. Shape (2, U + 1)."""
    passing_values: IntArray
    """Number of these values, each of which pays the link's latency once. Shape (2, U + 1)."""
    spans: IntArray
    """For each produced value: its unit, the first and the last unit that produces or reads it, and
    its bytes. Shape (4, values)."""

    first_backward: int
    """First operator of the backward, n if there is none."""
    first_update: int
    """First operator of the weight updates, n if there are none."""
    s_per_byte: FloatArray
    """Transfer time per byte between devices. Shape (D, D)."""
    link_latency_s: FloatArray
    """Latency of a transfer between devices. Shape (D, D)."""
    stretches: Stretches
    """Cached sizes of stretches of the finest row of units of this model."""
    end_bytes: int
    """Bytes that all stages together hold at the end of a step at least, however it is cut."""
    cuts: IntArray
    """The corresponding cut of the finest row. Length U + 1."""

    @property
    def n_units(self) -> int:
        """Number of units, which is also the largest number of stages."""
        return len(self.first_op)

    def of_operators(self, cuts: IntArray, of_stage: Sequence[int]) -> IntArray:
        """Map each operator to the item of `of_stage` for its stage. Length n.

        Args:
            cuts: begins of S stages, then the end of the last: ascending from 0 to U. Length S + 1.
            of_stage: an item per stage, such as its device. Length S.

        """
        of_unit = np.repeat(np.array(of_stage, dtype=np.int64), np.diff(cuts))
        of_op: IntArray = of_unit[self.unit_of]
        return of_op

    def receive_s(self, source: int, target: int) -> FloatArray:
        """Return the time for `target` to receive what crosses each cut. Length U + 1."""
        latency_s = np.where(self.crossing_bytes > 0, self.link_latency_s[source, target], 0.0)
        seconds: FloatArray = latency_s + self.crossing_bytes * self.s_per_byte[source, target]
        return seconds

    def link_s(self, source: int, target: int) -> FloatArray:
        """Return an upper bound of the busier link's load between two devices at each cut.

        It assumes that everything crossing the cut goes between these two. Length U + 1.
        """
        both = ((source, target), (target, source))
        onwards, back = (
            values * self.link_latency_s[link] + size * self.s_per_byte[link]
            for link, values, size in zip(
                both, self.passing_values, self.passing_bytes, strict=True
            )
        )
        busier: FloatArray = np.maximum(onwards, back)
        return busier

    def sending_s(self, source: int, target: int) -> FloatArray:
        """Return the sending time of the stage between each pair of cuts. Shape (U + 1, U + 1).

        It is the longer of sending to later and to earlier stages, over links like the one from
        `source` to `target`, as if one link carried everything.
        """
        home, first, last, size = self.spans
        latency_s, s_per_byte = (
            self.link_latency_s[source, target],
            self.s_per_byte[source, target],
        )
        value_s = latency_s + size * s_per_byte
        end = np.full_like(home, self.n_units)
        # A stage of units b to e - 1 sends values that it produces and that a unit from e on reads.
        onwards = (np.zeros_like(home), home, home + 1, last)
        back = (first + 1, home, home + 1, end)
        return np.maximum(*(self._summed(box, value_s) for box in (onwards, back)))

    def _summed(
        self, box: tuple[IntArray, IntArray, IntArray, IntArray], values: FloatArray
    ) -> FloatArray:
        """Return sums of `values` over boxes of begins and ends, all inclusive."""
        low, high, first, last = box
        table = np.zeros((self.n_units + 2, self.n_units + 2))
        is_nonempty = (low <= high) & (first <= last)
        for row, column, sign in (
            (low, first, 1.0),
            (high + 1, first, -1.0),
            (low, last + 1, -1.0),
            (high + 1, last + 1, 1.0),
        ):
            np.add.at(table, (row[is_nonempty], column[is_nonempty]), sign * values[is_nonempty])
        # Differences of sums may round slightly below 0.
        sums = np.maximum(table.cumsum(axis=0).cumsum(axis=1), 0.0)
        return np.ascontiguousarray(sums[:-1, :-1])

    def merged(self, cuts: IntArray) -> "StageLine":
        """Return the row of coarser units between `cuts`, which ascend from 0 to U."""
        begins, size = cuts[:-1], self.spans[3]
        return replace(
            self,
            unit_of=np.searchsorted(begins, self.unit_of, side="right") - 1,
            first_op=self.first_op[begins],
            last_op=self.last_op[cuts],
            load_before_s=np.ascontiguousarray(self.load_before_s[:, cuts]),
            crossing_bytes=self.crossing_bytes[cuts],
            passing_bytes=self.passing_bytes[:, cuts],
            passing_values=self.passing_values[:, cuts],
            spans=np.vstack([np.searchsorted(begins, self.spans[:3], side="right") - 1, size]),
            cuts=self.cuts[cuts],
        )


def stage_line(problem: Problem, microbatches: int = 1) -> StageLine:
    """Return the units of `problem`. O(n log n + reads + n D).

    Loads are per microbatch; weight updates, which run once per step, count proportionally.

    Raises:
        SpecError: if the backward of the graph does not come last, or updates come before its end.

    """
    graph = problem.graph
    row = _row_of(graph)
    units = row.stretches.units
    unit_of, count = units.unit_of, len(units.first_op)
    load_s = np.zeros((count, problem.topology.n_devices))
    share = np.where(graph.is_update, 1.0 / microbatches, 1.0)
    np.add.at(load_s, unit_of, problem.costs.op_time_s * share[:, np.newaxis])
    before_s = np.zeros((problem.topology.n_devices, count + 1))
    np.cumsum(load_s.T, axis=1, out=before_s[:, 1:])
    return StageLine(
        unit_of,
        units.first_op,
        units.last_op,
        before_s,
        row.passing_bytes.sum(axis=0),
        row.passing_bytes,
        row.passing_values,
        row.spans,
        units.first_backward,
        units.first_update,
        problem.costs.s_per_byte,
        problem.costs.link_latency_s,
        row.stretches,
        row.end_bytes,
        np.arange(count + 1),
    )


def _unit_tables(graph: OpGraph) -> UnitTables:
    """Return the finest units of a graph."""
    first_backward, unit_of = graph.first_backward, stretch_of_operators(graph)
    count = int(unit_of.max()) + 1
    first_op = np.full(count, graph.n_ops, dtype=np.int64)
    np.minimum.at(first_op, unit_of, np.arange(graph.n_ops))
    # Without a backward, units are consecutive runs of operators.
    last_op = np.full(count + 1, graph.n_ops - 1, dtype=np.int64)
    if first_backward == graph.n_ops:
        last_op[:-1] = first_op - 1
    first_update = _first_update(graph)
    phase_ops = np.empty((count, 3, 2), dtype=np.int64)
    phase_ops[..., 0], phase_ops[..., 1] = graph.n_ops, -1
    ops = np.arange(graph.n_ops)
    phase = np.searchsorted([first_backward, first_update], ops, side="right")
    np.minimum.at(phase_ops[..., 0], (unit_of, phase), ops)
    np.maximum.at(phase_ops[..., 1], (unit_of, phase), ops)
    return UnitTables(unit_of, first_op, last_op, phase_ops, first_backward, first_update)


class _Row(NamedTuple):
    """The fields of a `StageLine` that depend on the graph alone."""

    stretches: Stretches
    spans: IntArray
    passing_bytes: IntArray
    passing_values: IntArray
    end_bytes: int


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def _row_of(graph: OpGraph) -> _Row:
    """Return what all cuts of a graph into stages share."""
    memory, units = memory_tables(graph), _unit_tables(graph)
    scratch = stretch_scratch(graph.n_values, len(graph.weight_names), graph.n_ops)
    known = no_bytes(repeated=repeated_units(graph, memory, units))
    spans = _spans(graph, units.unit_of)
    stretches = Stretches(memory, units, scratch, known)
    passing = _passing(spans, len(units.first_op))
    return _Row(stretches, spans, *passing, _end_bytes(memory, units.unit_of))


def _end_bytes(memory: MemoryTables, unit_of: IntArray) -> int:
    """Return `StageLine.end_bytes`: all weights, and the results of the model.

    Results that are views of another unit's values are left out: the stage that makes the value may
    free it, and the one that makes the view hold a copy of fewer bytes.
    """
    unit = np.where(memory.producer >= 0, unit_of[memory.producer], -1)
    results = np.flatnonzero(memory.is_output)
    owner, is_of_one_unit = results, unit[results] >= 0
    while (is_view := memory.base[owner] >= 0).any():
        owner = np.where(is_view, memory.base[owner], owner)
        is_of_one_unit &= unit[owner] == unit[results]
    owners, used = np.unique(owner[is_of_one_unit]), np.unique(memory.uses)
    return int(memory.weight_bytes[used].sum() + memory.alloc_bytes[owners].sum())


def _first_update(graph: OpGraph) -> int:
    is_update = graph.is_update
    first = graph.n_ops - int(np.count_nonzero(is_update))
    if is_update[:first].any():
        early = graph.names[int(np.argmax(is_update))]
        raise SpecError(
            f"weight updates must come last in a step, but operator {early} does not; add them "
            "with fxpart.with_optimizer"
        )
    return first


def _spans(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return `StageLine.spans`."""
    computed = graph.value_producer >= 0
    home = np.zeros(graph.n_values, dtype=np.int64)
    home[computed] = unit_of[graph.value_producer[computed]]
    low, high = home.copy(), home.copy()
    readers = unit_of[graph.readers]
    np.minimum.at(low, graph.reads, readers)
    np.maximum.at(high, graph.reads, readers)
    return np.stack([table[computed] for table in (home, low, high, graph.value_bytes)])


def _passing(spans: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return bytes and number of the values that cross each cut forwards, and backwards."""
    home, low, high, value_bytes = spans
    # A value crosses cuts home + 1 to high forwards, and low + 1 to home backwards.
    size, values = np.zeros((2, 2, count + 2), dtype=np.int64)
    for row, (first, last) in enumerate(((home, high), (low, home))):
        for change, amount in ((size[row], value_bytes), (values[row], np.ones_like(home))):
            np.add.at(change, first + 1, amount)
            np.subtract.at(change, last + 1, amount)
    return np.cumsum(size, axis=1)[:, :-1], np.cumsum(values, axis=1)[:, :-1]
