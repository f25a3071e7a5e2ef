"""Embedding tables packed onto equal devices: the fewest devices, then the shortest computing.

Tables are taken largest first. A device is tried with one more table only where the least bytes
that it could need are within its memory, so that almost every walk over the model is of a device
that takes the table.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.holding import live_bytes, weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables

__all__ = ["TableSizes", "packed_by_search", "packed_tightly", "spread_by_time", "table_sizes"]


# Memory that a device needs for a set of embedding tables and the dense rest of the model.

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
        key = tuple(sorted(units))
        if key not in self.known:
            tables = np.concatenate([self.units[unit] for unit in key])
            device_of = np.where(self.dense, _HERE, _ELSEWHERE).astype(np.int64)
            device_of[tables] = _HERE
            others_turn = np.full(len(device_of), _ELSEWHERE, dtype=np.int64)
            others_turn[tables] = _HERE
            live = max(
                int(live_bytes(self.memory, at, _HERE).max()) for at in (device_of, others_turn)
            )
            self.known[key] = (
                weight_bytes_of(self.memory, np.flatnonzero(device_of == _HERE)) + live
            )
        return self.known[key]


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
    single = (lowest == highest) & (lowest >= 0)
    sizes = np.zeros(count, dtype=np.int64)
    np.add.at(sizes, lowest[single], item_bytes[single])
    return sizes


Bins = list[tuple[int, ...]]
"""Tables of each device."""

_MOST_STEPS = 20_000
"""Partial packings that the search looks at: enough to try all of eight tables."""


def packed_tightly(sizes: TableSizes, order: list[int], capacity_bytes: int) -> Bins:
    """Return tables packed by best fit decreasing: each on the fullest device that takes it.

    A new device where none does, so there may be more than there are. Each table alone must fit.
    O(tables x devices), and about one walk over the model for each table.
    """
    bins: Bins = []
    used_bytes = np.zeros(0, dtype=np.int64)
    for unit in order:
        added = int(sizes.unit_bytes[unit])
        room = np.flatnonzero(sizes.least_bytes + used_bytes + added <= capacity_bytes)
        # A stable sort: of equally full devices, the first.
        for index in room[np.argsort(-used_bytes[room], kind="stable")].tolist():
            trial = (*bins[index], unit)
            if sizes.needed_bytes(trial) <= capacity_bytes:
                bins[index] = trial
                used_bytes[index] += added
                break
        else:
            bins.append((unit,))
            used_bytes = np.append(used_bytes, added)
    return bins


def packed_by_search(
    sizes: TableSizes, order: list[int], capacity_bytes: int, most_bins: int
) -> Bins | None:
    """Return the first packing on at most `most_bins` devices, trying all; None if none is found.

    Up to eight tables, None means that there is none; of more, that some thousand are none.
    """
    # A stack of partial packings, each with what its devices need at least.
    stack: list[tuple[Bins, list[int]]] = [([], [])]
    for _ in range(_MOST_STEPS):
        if not stack:
            return None
        bins, used_bytes = stack.pop()
        place = sum(map(len, bins))
        if place == len(order):
            if all(sizes.needed_bytes(tables) <= capacity_bytes for tables in bins):
                return bins
            continue
        unit = order[place]
        added = int(sizes.unit_bytes[unit])
        # Devices are alike: of the empty ones, one is enough. What is pushed last is tried first.
        if len(bins) < most_bins:
            stack.append(([*bins, (unit,)], [*used_bytes, added]))
        for index in sorted(range(len(bins)), key=lambda i: (used_bytes[i], -i)):
            if sizes.least_bytes + used_bytes[index] + added <= capacity_bytes:
                trial, bytes_held = list(bins), list(used_bytes)
                trial[index] = (*bins[index], unit)
                bytes_held[index] += added
                stack.append((trial, bytes_held))
    return None


def spread_by_time(
    sizes: TableSizes, order: list[int], capacity_bytes: int, op_time_s: FloatArray
) -> Bins | None:
    """Return tables each on the device that is least busy of those that take it.

    None when one finds no room, for tightly filled devices leave no choice, or when a device gets
    none.

    Args:
        sizes: of the tables.
        order: all tables, in the order in which they choose.
        capacity_bytes: what each device has.
        op_time_s: seconds of each operator on each of the devices to spread over. Shape (n, D).

    """
    count = op_time_s.shape[1]
    bins: Bins = [()] * count
    used_bytes, busy_s = np.zeros(count, dtype=np.int64), np.zeros(count)
    for unit in order:
        after_s = busy_s + op_time_s[sizes.units[unit]].sum(axis=0)
        added = int(sizes.unit_bytes[unit])
        room = np.flatnonzero(sizes.least_bytes + used_bytes + added <= capacity_bytes)
        for index in room[np.lexsort((used_bytes[room], after_s[room]))].tolist():
            trial = (*bins[index], unit)
            if sizes.needed_bytes(trial) <= capacity_bytes:
                bins[index] = trial
                used_bytes[index] += added
                busy_s[index] = after_s[index]
                break
        else:
            return None
    return bins if all(bins) else None
