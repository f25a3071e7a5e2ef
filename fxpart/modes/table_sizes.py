"""What a device needs for some embedding tables and, in its turn, the dense rest of the model."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxpart.cost.holding import live_bytes, weight_bytes_of
from fxpart.cost.tables import MemoryTables
from fxpart.graph import IntArray, OpGraph
from fxpart.problem import Problem

__all__ = ["TableSizes", "table_sizes"]

BoolArray = npt.NDArray[np.bool_]
_HERE, _ELSEWHERE = 0, 1


@dataclass(frozen=True, eq=False, slots=True)
class TableSizes:
    """Bytes that any device needs at least, at once; and exactly, by a walk over the model."""

    memory: MemoryTables
    dense: BoolArray
    """Which operators belong to no table. Length n."""
    units: tuple[IntArray, ...]
    """Operators of each table."""
    least_bytes: int
    """What every device needs for the dense rest, wherever the tables are."""
    unit_bytes: IntArray
    """Weights and inputs of each unit that nothing else uses: what it adds to that at least."""
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    """What was found for units asked about before."""

    def at_least(self, units: tuple[int, ...]) -> int:
        """Return a lower bound of `needed_bytes`, without a walk."""
        return self.least_bytes + int(self.unit_bytes[list(units)].sum())

    def needed_bytes(self, units: tuple[int, ...]) -> int:
        """Return what a device needs that holds `units`: a walk over the model, O(n + reads)."""
        asked = tuple(sorted(units))
        if asked not in self.known:
            tables = np.concatenate([self.units[unit] for unit in asked])
            mine = np.where(self.dense, _HERE, _ELSEWHERE).astype(np.int64)
            mine[tables] = _HERE
            others_turn = np.full(len(mine), _ELSEWHERE, dtype=np.int64)
            others_turn[tables] = _HERE
            live = max(int(live_bytes(self.memory, at, _HERE).max()) for at in (mine, others_turn))
            self.known[asked] = weight_bytes_of(self.memory, np.flatnonzero(mine == _HERE)) + live
        return self.known[asked]


def table_sizes(problem: Problem, units: list[IntArray]) -> TableSizes:
    """Return the sizes of `units`, the operators of each table."""
    graph, memory = problem.graph, problem.memory
    unit_of = np.full(graph.n_ops, -1, dtype=np.int64)
    for unit, operators in enumerate(units):
        unit_of[operators] = unit
    dense = unit_of < 0
    cheapest = memory._replace(value_bytes=_least_result_bytes(graph, unit_of))
    place = np.where(dense, _HERE, _ELSEWHERE).astype(np.int64)
    least = weight_bytes_of(memory, np.flatnonzero(dense))
    least += int(live_bytes(cheapest, place, _HERE).max())
    alone = _of_one_unit(unit_of, graph.use_start, graph.uses, memory.weight_bytes, len(units))
    inputs = np.where(graph.value_producer < 0, graph.value_alloc_bytes, 0)
    alone += _of_one_unit(unit_of, graph.read_start, graph.reads, inputs, len(units))
    return TableSizes(memory, dense, tuple(units), least, alone)


def _least_result_bytes(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return the least bytes that a unit's result takes where the dense rest reads it. Length V.

    It is sent there, or made there. Made there it may be a view: then its storage counts, once for
    all results that are views of it, and not at all if it is not the unit's own.
    """
    producer = graph.value_producer
    maker_unit = np.where(producer >= 0, unit_of[producer], -1)
    least = np.zeros(graph.n_values, dtype=np.int64)
    root = np.arange(graph.n_values)
    for value in np.flatnonzero(graph.value_base >= 0).tolist():
        base = int(graph.value_base[value])
        same = root[base] >= 0 and maker_unit[base] == maker_unit[value]
        root[value] = root[base] if same else -1
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    read_by_dense = np.unique(graph.reads[unit_of[reader] < 0])
    counted: set[int] = set()
    for value in read_by_dense[maker_unit[read_by_dense] >= 0].tolist():
        storage = int(root[value])
        if storage >= 0 and storage not in counted:
            counted.add(storage)
            least[value] = min(graph.value_bytes[value], graph.value_alloc_bytes[storage])
    return least


def _of_one_unit(
    unit_of: IntArray, start: IntArray, items: IntArray, item_bytes: IntArray, count: int
) -> IntArray:
    """Return for each unit the bytes of the items that only its operators touch."""
    toucher = unit_of[np.repeat(np.arange(len(unit_of)), np.diff(start))]
    lowest = np.full(len(item_bytes), count, dtype=np.int64)
    highest = np.full(len(item_bytes), -1, dtype=np.int64)
    np.minimum.at(lowest, items, toucher)
    np.maximum.at(highest, items, toucher)
    one = (lowest == highest) & (lowest >= 0)
    found = np.zeros(count, dtype=np.int64)
    np.add.at(found, lowest[one], item_bytes[one])
    return found
