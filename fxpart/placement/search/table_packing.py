"""Pack embedding tables onto equal devices: minimize devices, then compute time.

Tables are packed largest first. A device is evaluated with another table only if a lower bound of
its memory fits, so almost every pass over the model is for a device that takes the table.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph, only_user
from fxpart.cost.holding import live_bytes, weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables

__all__ = ["TableSizes", "packed_by_search", "packed_tightly", "spread_by_time", "table_sizes"]


# Memory of a device with a set of embedding tables and the dense rest of the model.

BoolArray = npt.NDArray[np.bool_]
_HERE, _ELSEWHERE = 0, 1


@dataclass(frozen=True, eq=False, slots=True)
class TableSizes:
    """Memory of a device with some tables, as a fast lower bound and exactly."""

    memory: MemoryTables
    dense: BoolArray
    """Whether an operator belongs to no table. Length n."""
    units: tuple[IntArray, ...]
    """Operators of each table."""
    least_bytes: int
    """Lower bound for the dense rest, wherever the tables are."""
    unit_bytes: IntArray
    """Weights and inputs used only by each unit: a lower bound of what it adds."""
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Cached results of `needed_bytes`."""

    def at_least(self, units: tuple[int, ...]) -> int:
        """Return a lower bound of `needed_bytes` in constant time per unit."""
        return self.least_bytes + int(self.unit_bytes[list(units)].sum())

    def needed_bytes(self, units: tuple[int, ...]) -> int:
        """Return the memory of a device with `units`, by a pass over the model. O(n + reads)."""
        key = tuple(sorted(units))
        if key not in self.known:
            tables = np.concatenate([self.units[unit] for unit in key])
            device_of = np.where(self.dense, _HERE, _ELSEWHERE).astype(np.int64)
            device_of[tables] = _HERE
            others_turn = np.full(len(device_of), _ELSEWHERE, dtype=np.int64)
            others_turn[tables] = _HERE
            live = max(
                int(live_bytes(self.memory, turn, _HERE).max()) for turn in (device_of, others_turn)
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
    dense_bytes = weight_bytes_of(memory, np.flatnonzero(dense))
    dense_bytes += int(live_bytes(cheapest, place, _HERE).max())
    alone = _of_one_unit(unit_of, graph.use_start, graph.uses, memory.weight_bytes, len(units))
    inputs = np.where(graph.value_producer < 0, graph.value_alloc_bytes, 0)
    alone += _of_one_unit(unit_of, graph.read_start, graph.reads, inputs, len(units))
    return TableSizes(memory, dense, tuple(units), dense_bytes, alone)


def _least_result_bytes(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return a lower bound of each unit result's bytes where the dense rest reads it. Length V.

    The result is either received or produced there. If produced, it may be a view: then its storage
    counts once for all views of it, and not at all if it belongs to another unit.
    """
    producer = graph.value_producer
    maker_unit = np.where(producer >= 0, unit_of[producer], -1)
    lower_bytes = np.zeros(graph.n_values, dtype=np.int64)
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
            lower_bytes[value] = min(graph.value_bytes[value], graph.value_alloc_bytes[storage])
    return lower_bytes


def _of_one_unit(
    unit_of: IntArray, start: IntArray, items: IntArray, item_bytes: IntArray, count: int
) -> IntArray:
    """Return the bytes of the items used only by each unit."""
    toucher = unit_of[np.repeat(np.arange(len(unit_of)), np.diff(start))]
    unit = only_user(len(item_bytes), items, toucher)
    sizes = np.zeros(count, dtype=np.int64)
    np.add.at(sizes, unit[unit >= 0], item_bytes[unit >= 0])
    return sizes


Bins = list[tuple[int, ...]]
"""Tables of each device."""

_MOST_STEPS = 20_000
"""Most partial packings searched, enough to try all packings of eight tables."""


def packed_tightly(sizes: TableSizes, order: list[int], capacity_bytes: int) -> Bins:
    """Pack tables by best fit decreasing, each on the fullest device that takes it.

    If no device does, a new one is opened, so the result may exceed the available devices. Each
    table must fit by itself. O(tables x devices), and about one pass over the model per table.
    """
    bins: Bins = []
    used_bytes = np.zeros(0, dtype=np.int64)
    for unit in order:
        added = int(sizes.unit_bytes[unit])
        candidates = np.flatnonzero(sizes.least_bytes + used_bytes + added <= capacity_bytes)
        # A stable sort prefers the first of equally full devices.
        for index in candidates[np.argsort(-used_bytes[candidates], kind="stable")].tolist():
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
    """Return the first packing on at most `most_bins` devices by exhaustive search, or None.

    For up to eight tables, None means that there is no packing; for more, that none was found
    within the step limit.
    """
    # A stack of partial packings, each with lower bounds of its devices' memory.
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
        # Devices are equal, so one empty device is enough. The last pushed is tried first.
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
    """Place each table on the least busy device that takes it.

    None if a table does not fit anymore, or a device gets no table.

    Args:
        sizes: sizes of the tables.
        order: all tables, in the order in which they are placed.
        capacity_bytes: memory of each device.
        op_time_s: seconds of each operator on each of the devices to use. Shape (n, D).

    """
    count = op_time_s.shape[1]
    bins: Bins = [()] * count
    used_bytes, busy_s = np.zeros(count, dtype=np.int64), np.zeros(count)
    for unit in order:
        after_s = busy_s + op_time_s[sizes.units[unit]].sum(axis=0)
        added = int(sizes.unit_bytes[unit])
        candidates = np.flatnonzero(sizes.least_bytes + used_bytes + added <= capacity_bytes)
        for index in candidates[np.lexsort((used_bytes[candidates], after_s[candidates]))].tolist():
            trial = (*bins[index], unit)
            if sizes.needed_bytes(trial) <= capacity_bytes:
                bins[index] = trial
                used_bytes[index] += added
                busy_s[index] = after_s[index]
                break
        else:
            return None
    return bins if all(bins) else None
