"""Find identical blocks of a model, so that shifted stretches of them need equal memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.cost.tables import MemoryTables
from fxpart.placement.stages.stretch_bytes import UnitTables

__all__ = ["Repeated", "repeated_units"]

_FEWEST = 3
"""Fewest blocks to look for repetition."""
_IN_BLOCK, _IN_SECTION, _BETWEEN = range(3)
"""Where an operator runs."""


class Repeated(NamedTuple):
    """Units `first` to `end` - 1, in identical blocks of `period` units; 0 for none."""

    first: int = 0
    period: int = 0
    end: int = 0


def repeated_units(graph: OpGraph, memory: MemoryTables, units: UnitTables) -> Repeated:
    """Return blocks of units for which `stretch_bytes` is invariant under shifts by whole blocks.

    These are blocks whose operators have equal tokens: everything that a pass over a stretch reads,
    with other operators, values and weights identified by their distance in blocks. A shift by a
    block must also preserve the order of all operators. O(n log n + reads).
    """
    rows = _rows(graph, units)
    if len(rows) < _FEWEST:
        return Repeated()
    blocks = _Blocks(memory, units, rows)
    if not blocks.keep_order():
        return Repeated()
    tokens = blocks.tokens()
    longest, begin = (0, 0), 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or not np.array_equal(tokens[number], tokens[begin]):
            longest = max(longest, (number - begin, -begin))
            begin = number
    count, first = longest[0], -longest[1]
    if count < _FEWEST:
        return Repeated()
    return Repeated(rows[first][0], rows[0][1] - rows[0][0], rows[first + count - 1][1])


def _rows(graph: OpGraph, units: UnitTables) -> list[tuple[int, int]]:
    """Return begin and end of each block in the longest row of blocks of equal size."""
    begins, known = list[int](), {""}
    for unit, op in enumerate(units.first_op.tolist()):
        path = block_of(graph.modules[op])
        if path not in known:
            known.add(path)
            begins.append(unit)
    if len(begins) < _FEWEST:
        return []
    period = Counter(after - before for before, after in pairwise(begins)).most_common(1)[0][0]
    rows, longest = list[tuple[int, int]](), list[tuple[int, int]]()
    for begin, after in pairwise([*begins, begins[-1] + period]):
        fits = after - begin == period and after <= len(units.first_op)
        rows = [*rows, (begin, after)] if fits else []
        longest = max(longest, rows, key=len)
    return longest


class _Blocks:
    """The operators of a row of blocks, with references relative to a block."""

    def __init__(
        self, memory: MemoryTables, units: UnitTables, rows: Sequence[tuple[int, int]]
    ) -> None:
        self._m, self._units = memory, units
        first, end, period = rows[0][0], rows[-1][1], rows[0][1] - rows[0][0]
        inside = (units.unit_of >= first) & (units.unit_of < end)
        ops = np.flatnonzero(inside)
        of_block = (units.unit_of[ops] - first) // period
        self._ops = [ops[of_block == number] for number in range(len(rows))]
        # The block of each operator, or -1, and its place there.
        self._block, self._place = np.full((2, len(units.unit_of)), -1, dtype=np.int64)
        for number, row in enumerate(self._ops):
            self._block[row], self._place[row] = number, np.arange(len(row))
        self._unit = (units.unit_of - first) % period
        bounds = (0, units.first_backward, units.first_update, len(units.unit_of))
        parts = [ops[(ops >= low) & (ops < high)] for low, high in pairwise(bounds)]
        self._sections = [(int(part[0]), int(part[-1])) for part in parts if len(part)]
        self._weights = self._weight_table()

    def keep_order(self) -> bool:
        """Return whether a shift by one block preserves the order of all operators."""
        if len({len(row) for row in self._ops}) > 1:
            return False
        before, after = np.concatenate(self._ops[:-1]), np.concatenate(self._ops[1:])
        return bool((np.diff(after[np.argsort(before)]) > 0).all())

    def tokens(self) -> list[IntArray]:
        """Return for each block everything that a pass over a stretch reads of its operators."""
        m, ops, units = self._m, np.concatenate(self._ops), self._units
        phase = (ops >= units.first_backward) + (ops >= units.first_update)
        tables = [
            np.column_stack([self._block[ops], self._unit[ops], phase]),
            *self._listed(ops, m.use_start, self._used),
            *self._listed(ops, m.read_start, self._read),
            *self._listed(ops, m.made_start, self._made),
        ]
        begins = np.arange(1, len(self._ops))
        of_blocks = [np.split(table[:, 1:], table[:, 0].searchsorted(begins)) for table in tables]
        return [
            np.concatenate([part.ravel() for part in parts])
            for parts in zip(*of_blocks, strict=True)
        ]

    def _listed(
        self, ops: IntArray, start: IntArray, columns: Callable[[IntArray, IntArray], IntArray]
    ) -> list[IntArray]:
        """Return two tables: how many items each operator has, and the `columns` of each item.

        The items of `op` are ``start[op]`` to ``start[op + 1] - 1``. The first column of both
        tables is the block, ascending.
        """
        block, counts = self._block[ops], start[ops + 1] - start[ops]
        block_of_item = np.repeat(block, counts)
        offset = np.repeat(start[ops] - (np.cumsum(counts) - counts), counts)
        item_columns = columns(offset + np.arange(len(offset)), block_of_item)
        return [np.column_stack([block, counts]), np.column_stack([block_of_item, item_columns])]

    def _used(self, uses: IntArray, block: IntArray) -> IntArray:
        first, kind = self._weights[self._m.uses[uses]].T
        return np.column_stack([np.where(first >= 0, first - block, -1), kind])

    def _read(self, reads: IntArray, block: IntArray) -> IntArray:
        return self._values(self._m.reads[reads], block)

    def _made(self, values: IntArray, block: IntArray) -> IntArray:
        m, base, held_until = self._m, self._m.base[values], self._m.held[values]
        of_base, of_holder = self._values(base, block), self._operators(held_until, block)
        of_base[base < 0], of_holder[held_until < 0] = -1, -1
        sizes = m.alloc_bytes[values], m.value_bytes[values]
        return np.column_stack([*sizes, m.is_output[values], of_base, of_holder])

    def _values(self, values: IntArray, block: IntArray) -> IntArray:
        """Return values relative to blocks; those made outside of blocks are absolute."""
        m, producer = self._m, self._m.producer[values]
        is_inside = (producer >= 0) & (self._block[producer] >= 0)
        place = np.where(is_inside, values - m.made_start[producer], values)
        sizes = m.alloc_bytes[values], m.value_bytes[values]
        return np.column_stack([place, self._operators(producer, block), *sizes])

    def _operators(self, ops: IntArray, block: IntArray) -> IntArray:
        """Return the positions of operators relative to blocks. Inputs, -1, run before all blocks.

        For an operator outside of blocks, it is whether it runs before or after each section of
        blocks. If it runs inside a section, the position differs for every block.
        """
        is_inside = (ops >= 0) & (self._block[ops] >= 0)
        within, before = np.zeros(len(ops), dtype=np.bool_), np.zeros(len(ops), dtype=np.int64)
        for section, (begin, end) in enumerate(self._sections):
            within |= (begin < ops) & (ops < end)
            before += (ops < begin).astype(np.int64) << section
        none = np.zeros_like(ops)
        in_block = np.column_stack([none + _IN_BLOCK, self._block[ops] - block, self._place[ops]])
        in_section = np.column_stack([none + _IN_SECTION, ops, block])
        between = np.column_stack([none + _BETWEEN, before, none])
        elsewhere = np.where(within[:, None], in_section, between)
        return np.where(is_inside[:, None], in_block, elsewhere)

    def _weight_table(self) -> IntArray:
        """Return the first block that uses each weight, and its kind. Shape (W, 2).

        Weights used by blocks alone are of one kind if they have equal bytes and relative users;
        the block of any other weight is -1, and its kind its own.
        """
        kinds: dict[tuple[object, ...], int] = {}
        table = []
        for weight, users in enumerate(_users(self._m)):
            blocks = self._block[users]
            first = int(blocks.min(initial=len(self._ops)))
            if first < 0:
                table.append((-1, -1 - weight))
                continue
            places = zip((blocks - first).tolist(), self._place[users].tolist(), strict=True)
            kind = (int(self._m.weight_bytes[weight]), *places)
            table.append((first, kinds.setdefault(kind, len(kinds))))
        return np.array(table, dtype=np.int64).reshape(-1, 2)


def _users(memory: MemoryTables) -> list[IntArray]:
    """Return the operators that use each weight."""
    of_use = np.repeat(np.arange(len(memory.use_start) - 1), np.diff(memory.use_start))
    order: IntArray = np.argsort(memory.uses, kind="stable")
    ends = np.cumsum(np.bincount(memory.uses, minlength=len(memory.weight_bytes)))
    return np.split(of_use[order], ends)[:-1]
