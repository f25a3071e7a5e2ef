"""Find identical blocks of a model, so that shifted stretches of them need equal memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
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
    tokens = [list(blocks.tokens(number)) for number in range(len(rows))]
    longest, begin = (0, 0), 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or tokens[number] != tokens[begin]:
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


class _Columns(NamedTuple):
    """Columns of `MemoryTables` as lists, whose items are read one by one."""

    use_start: list[int]
    uses: list[int]
    read_start: list[int]
    reads: list[int]
    made_start: list[int]
    producer: list[int]
    base: list[int]
    held: list[int]
    alloc_bytes: list[int]
    value_bytes: list[int]
    weight_bytes: list[int]
    is_output: list[bool]


class _Blocks:
    """The operators of a row of blocks, with references relative to a block."""

    def __init__(
        self, memory: MemoryTables, units: UnitTables, rows: Sequence[tuple[int, int]]
    ) -> None:
        self._m = _Columns(*(getattr(memory, name).tolist() for name in _Columns._fields))
        self._units, self._unit_of, self._rows = units, units.unit_of.tolist(), rows
        first, end, period = rows[0][0], rows[-1][1], rows[0][1] - rows[0][0]
        inside = (units.unit_of >= first) & (units.unit_of < end)
        ops = np.flatnonzero(inside)
        of_block = (units.unit_of[ops] - first) // period
        self._ops = [ops[of_block == number].tolist() for number in range(len(rows))]
        self._place = {
            op: (number, index)
            for number, row in enumerate(self._ops)
            for index, op in enumerate(row)
        }
        bounds = (0, units.first_backward, units.first_update, len(units.unit_of))
        parts = [ops[(ops >= low) & (ops < high)] for low, high in pairwise(bounds)]
        self._sections = [(int(part[0]), int(part[-1])) for part in parts if len(part)]
        self._users = _users(memory)

    def keep_order(self) -> bool:
        """Return whether a shift by one block preserves the order of all operators."""
        if len({len(row) for row in self._ops}) > 1:
            return False
        after = {
            op: then
            for row, behind in pairwise(self._ops)
            for op, then in zip(row, behind, strict=True)
        }
        shifted = [after[op] for op in sorted(after)]
        return all(before < then for before, then in pairwise(shifted))

    def tokens(self, number: int) -> Iterator[tuple[object, ...]]:
        """Yield for each operator of a block everything that a pass over a stretch reads of it."""
        m, first = self._m, self._rows[number][0]
        for op in self._ops[number]:
            weights = m.uses[m.use_start[op] : m.use_start[op + 1]]
            reads = m.reads[m.read_start[op] : m.read_start[op + 1]]
            yield (
                self._unit_of[op] - first,
                (op >= self._units.first_backward) + (op >= self._units.first_update),
                tuple(self._weight(weight, number) for weight in weights),
                tuple(self._value(value, number) for value in reads),
                tuple(
                    self._made(value, number)
                    for value in range(m.made_start[op], m.made_start[op + 1])
                ),
            )

    def _made(self, value: int, number: int) -> tuple[object, ...]:
        m, base, held_until = self._m, self._m.base[value], self._m.held[value]
        return (
            m.alloc_bytes[value],
            m.value_bytes[value],
            m.is_output[value],
            self._value(base, number) if base >= 0 else -1,
            self._op(held_until, number) if held_until >= 0 else -1,
        )

    def _value(self, value: int, number: int) -> tuple[object, ...]:
        """Return a value relative to a block; values made outside of blocks are absolute."""
        m, producer = self._m, self._m.producer[value]
        sizes = m.alloc_bytes[value], m.value_bytes[value]
        if producer not in self._place:
            return (value, self._op(producer, number), *sizes)
        return (value - m.made_start[producer], self._op(producer, number), *sizes)

    def _weight(self, weight: int, number: int) -> tuple[object, ...]:
        users = self._users[weight]
        if not all(op in self._place for op in users):
            return (weight,)
        return (self._m.weight_bytes[weight], *(self._op(op, number) for op in users))

    def _op(self, op: int, number: int) -> tuple[object, ...]:
        """Return the position of an operator relative to a block.

        For an operator outside of blocks, it is whether it runs before or after each section of
        blocks. If it runs inside a section, the position differs for every block.
        """
        place = self._place.get(op)
        if place is not None:
            return (place[0] - number, place[1])
        if any(begin < op < end for begin, end in self._sections):
            return ("within", op, number)
        return ("between", *(op < begin for begin, _ in self._sections))


def _users(memory: MemoryTables) -> list[list[int]]:
    """Return the operators that use each weight."""
    of_use = np.repeat(np.arange(len(memory.use_start) - 1), np.diff(memory.use_start))
    order: IntArray = np.argsort(memory.uses, kind="stable")
    counts = np.bincount(memory.uses, minlength=len(memory.weight_bytes))
    return [row.tolist() for row in np.split(of_use[order], np.cumsum(counts)[:-1])]
