"""A model as a row of units, between any two of which it may be cut into pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.problem import Problem
from fxpart.cost.tables import memory_tables
from fxpart.errors import SpecError
from fxpart.placement.search.units import stretch_of_operators
from fxpart.placement.stages.repeated import repeated_units
from fxpart.placement.stages.stretch_bytes import Stretches, UnitTables, no_bytes, stretch_room

__all__ = ["StageLine", "stage_line"]

_MOST_KEPT = 12
"""Graphs of which it is kept what their stretches hold: plans of one graph ask for the same."""


@dataclass(frozen=True, eq=False, slots=True)
class StageLine:
    """The U units of a model's forward, in graph order; no group is divided between two of them.

    A stage is a stretch of units. In a training step a backward operator belongs to the unit of
    the forward operator whose gradient it computes. Cut e, for 0 < e < U, lies before unit e.
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
    """Bytes of the values that are made on one side of each cut and read on the other; 0 at both
    ends. Length U + 1."""
    passing_bytes: IntArray
    """The same of what passes each cut onwards, in the first row, and back. Shape (2, U + 1)."""
    passing_values: IntArray
    """How many values those are: each waits for the link once. Shape (2, U + 1)."""
    spans: IntArray
    """Of each value that is made: its unit, the first and the last unit that makes or reads it, and
    its bytes. Shape (4, values)."""

    first_backward: int
    """The operators from this one on are the backward. n where there is none."""
    first_update: int
    """The operators from this one on update weights. n where there are none."""
    s_per_byte: FloatArray
    """What a byte takes from one device to another, in seconds. Shape (D, D)."""
    link_latency_s: FloatArray
    """What a transfer takes before its first byte. Shape (D, D)."""
    stretches: Stretches
    """What stretches hold of the finest row of units of this model."""
    cuts: IntArray
    """Which cut of that row each cut is. Length U + 1."""

    @property
    def n_units(self) -> int:
        """Number of units: as many stages are possible."""
        return len(self.first_op)

    def of_operators(self, cuts: IntArray, of_stage: Sequence[int]) -> IntArray:
        """Return for each operator the number that `of_stage` has for its stage. Length n.

        Args:
            cuts: where S stages begin, and at last where the last one ends: from 0 to U, rising.
                Length S + 1.
            of_stage: such as the device of each stage. Length S.

        """
        of_unit = np.repeat(np.array(of_stage, dtype=np.int64), np.diff(cuts))
        of_op: IntArray = of_unit[self.unit_of]
        return of_op

    def receive_s(self, source: int, target: int) -> FloatArray:
        """Return how long device `target` receives what crosses each cut. Length U + 1."""
        latency_s = np.where(self.crossing_bytes > 0, self.link_latency_s[source, target], 0.0)
        seconds: FloatArray = latency_s + self.crossing_bytes * self.s_per_byte[source, target]
        return seconds

    def link_s(self, source: int, target: int) -> FloatArray:
        """Return how long the busier link of two devices carries what passes each cut, at most.

        That is if all of it goes between these two. Length U + 1.
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
        """Return how long a stage sends what others read, by its first cut and the one behind it.

        To later stages or to earlier ones, whichever takes longer, over links like the one from
        `source` to `target`; as if all of it took one link. Shape (U + 1, U + 1).
        """
        home, first, last, size = self.spans
        latency_s, s_per_byte = (
            self.link_latency_s[source, target],
            self.s_per_byte[source, target],
        )
        value_s = latency_s + size * s_per_byte
        end = np.full_like(home, self.n_units)
        # A stage of units b to e - 1 sends on what it makes and some unit from e on reads.
        onwards = (np.zeros_like(home), home, home + 1, last)
        back = (first + 1, home, home + 1, end)
        return np.maximum(*(self._summed(box, value_s) for box in (onwards, back)))

    def _summed(
        self, box: tuple[IntArray, IntArray, IntArray, IntArray], of: FloatArray
    ) -> FloatArray:
        """Return the sums of what holds for begins and ends from first to last, both included."""
        low, high, first, last = box
        table = np.zeros((self.n_units + 2, self.n_units + 2))
        some = (low <= high) & (first <= last)
        for row, column, sign in (
            (low, first, 1.0),
            (high + 1, first, -1.0),
            (low, last + 1, -1.0),
            (high + 1, last + 1, 1.0),
        ):
            np.add.at(table, (row[some], column[some]), sign * of[some])
        # Differences of sums: what should be nothing may be a rounding below it.
        sums = np.maximum(table.cumsum(axis=0).cumsum(axis=1), 0.0)
        return np.ascontiguousarray(sums[:-1, :-1])

    def merged(self, cuts: IntArray) -> "StageLine":
        """Return the row whose units lie between `cuts`, which rise from 0 to U."""
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

    Loads are of one micro-batch: of an update of a weight, which is made once a step, its share.

    Raises:
        SpecError: for a graph whose backward does not come last, or updates before it ends.

    """
    graph = problem.graph
    stretches = _stretches(graph)
    units = stretches.units
    unit_of, count = units.unit_of, len(units.first_op)
    load_s = np.zeros((count, problem.topology.n_devices))
    share = np.where(graph.is_update, 1.0 / microbatches, 1.0)
    np.add.at(load_s, unit_of, problem.costs.op_time_s * share[:, np.newaxis])
    before_s = np.zeros((problem.topology.n_devices, count + 1))
    np.cumsum(load_s.T, axis=1, out=before_s[:, 1:])
    spans = _spans(graph, unit_of)
    passing_bytes, passing_values = _passing(spans, count)
    return StageLine(
        unit_of,
        units.first_op,
        units.last_op,
        before_s,
        passing_bytes.sum(axis=0),
        passing_bytes,
        passing_values,
        spans,
        units.first_backward,
        units.first_update,
        problem.costs.s_per_byte,
        problem.costs.link_latency_s,
        stretches,
        np.arange(count + 1),
    )


def _unit_tables(graph: OpGraph) -> UnitTables:
    """Return the finest units of a graph."""
    first_backward, unit_of = graph.first_backward, stretch_of_operators(graph)
    count = int(unit_of.max()) + 1
    first_op = np.full(count, graph.n_ops, dtype=np.int64)
    np.minimum.at(first_op, unit_of, np.arange(graph.n_ops))
    # Without a backward, the units lie one after the other.
    last_op = np.full(count + 1, graph.n_ops - 1, dtype=np.int64)
    if first_backward == graph.n_ops:
        last_op[:-1] = first_op - 1
    return UnitTables(unit_of, first_op, last_op, first_backward, _first_update(graph))


@lru_cache(maxsize=_MOST_KEPT)
def _stretches(graph: OpGraph) -> Stretches:
    """Return what is known of a graph's stretches, for all who cut it into stages."""
    memory, units = memory_tables(graph), _unit_tables(graph)
    room = stretch_room(graph.n_values, len(graph.weight_names), graph.n_ops)
    known = no_bytes(repeated=repeated_units(graph, memory, units))
    return Stretches(memory, units, room, known)


def _first_update(graph: OpGraph) -> int:
    is_update = graph.is_update
    first = graph.n_ops - int(np.count_nonzero(is_update))
    if is_update[:first].any():
        early = graph.names[int(np.argmax(is_update))]
        raise SpecError(
            f"updates of weights must come after all else in a step, operator {early} of them does"
            " not; add them with fxpart.with_optimizer"
        )
    return first


def _spans(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return `StageLine.spans`."""
    made = graph.value_producer >= 0
    home = np.zeros(graph.n_values, dtype=np.int64)
    home[made] = unit_of[graph.value_producer[made]]
    low, high = home.copy(), home.copy()
    readers = unit_of[graph.readers]
    np.minimum.at(low, graph.reads, readers)
    np.maximum.at(high, graph.reads, readers)
    return np.stack([table[made] for table in (home, low, high, graph.value_bytes)])


def _passing(spans: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return bytes and number of the values that pass each cut onwards, and back."""
    home, low, high, value_bytes = spans
    # A value passes the cuts home + 1 to high onwards, low + 1 to home back.
    size, values = np.zeros((2, 2, count + 2), dtype=np.int64)
    for row, (first, last) in enumerate(((home, high), (low, home))):
        for change, amount in ((size[row], value_bytes), (values[row], np.ones_like(home))):
            np.add.at(change, first + 1, amount)
            np.subtract.at(change, last + 1, amount)
    return np.cumsum(size, axis=1)[:, :-1], np.cumsum(values, axis=1)[:, :-1]
