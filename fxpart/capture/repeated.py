"""`with_more_blocks`: the graph of a deep model, from that of the same model with fewer blocks.

The blocks of a transformer are alike, so their captures repeat. A few blocks are captured, and the
graph of one period is inserted once for each further period of the deep model:

    before | A | B | C | D | after    ->    before | A | B | B' | B'' | C | D | after

B and C must be equal in everything, including references to the periods before and after them; then
any number of such periods can be inserted between them. Otherwise `NotRepeatedError` is raised.

The backward of a training step has the blocks in the opposite order:

    ... | D | C | B | A | ...    ->    ... | D | C | B'' | B' | B | A | ...
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import AGAIN, IntArray, OpGraph, only_user
from fxpart.core.symbolic_graph import OF_OPERATORS, SymbolicGraph

__all__ = ["NotRepeatedError", "Repetition", "graph_with_more_blocks", "with_more_blocks"]

_GLOBAL, _BEFORE, _A, _B, _C, _AFTER = range(6)
"""Regions: outside all blocks, the blocks before A, A, B, C, and the blocks after C."""
_Scalar = TypeVar("_Scalar", bound=np.generic)
_NUMBER = re.compile(r"(\d+)")
_LAST_NUMBER = re.compile(r"_[1-9]\d*$")


class NotRepeatedError(Exception):
    """The periods of a graph differ, so that the model must be captured whole."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The repeated blocks of a graph, and the number of repetitions."""

    blocks: str
    """Path of the list of blocks, such as ``model.layers``."""
    first: int
    """First block of the period A."""
    period: int
    """Number of blocks in each of A, B, C and D."""
    copies: int
    """Number of further periods."""


def graph_with_more_blocks(graph: OpGraph, repetition: Repetition) -> OpGraph:
    """Return the graph of a model or its training step with `Repetition.copies` more periods.

    Operators have the names that `torch.export` gives them.

    Raises:
        NotRepeatedError: if the periods B and C differ.

    """
    return _Expansion(graph, repetition, has_exact_names=True).graph()


def with_more_blocks(symbolic: SymbolicGraph, repetition: Repetition) -> SymbolicGraph:
    """Return `graph_with_more_blocks` of a symbolic graph, except for the numbers in its names.

    Products of symbolic sizes take numbers too, in some blocks.
    """
    expansion = _Expansion(symbolic.graph, repetition, has_exact_names=False)
    ops, values = expansion.ops, expansion.values
    return replace(
        symbolic,
        graph=expansion.graph(),
        coefficients={
            name: (ops if name in OF_OPERATORS else values).column(table)
            for name, table in symbolic.coefficients.items()
        },
        value_batch_dim=values.column(symbolic.value_batch_dim),
    )


class _Items:
    """Operators, values or weights, with B repeated.

    Args:
        label: the block of each item, -1 for none.
        repetition: the blocks to repeat.

    """

    def __init__(self, label: IntArray, repetition: Repetition) -> None:
        first, period = repetition.first, repetition.period
        bounds = [0, *(first + period * n for n in range(4))]
        self.region = np.searchsorted(bounds, label, side="right")
        self.copies = repetition.copies
        self.offset = np.zeros(len(label), dtype=np.int64)
        for region in (_A, _B, _C):
            self.offset[self.of(region)] = np.arange(len(self.of(region)))
        # The period after C, for references from C.
        last = np.flatnonzero((label >= bounds[4]) & (label < bounds[4] + period))
        self.offset[last] = np.arange(len(last))
        self.is_next = np.zeros(len(label), dtype=np.bool_)
        self.is_next[last] = True
        if len({*(len(self.of(region)) for region in (_A, _B, _C)), len(last)}) > 1:
            raise NotRepeatedError("blocks differ in length")
        self._insert()

    def of(self, region: int) -> IntArray:
        """Return the items of a region."""
        return np.flatnonzero(self.region == region)

    def _insert(self) -> None:
        """Set `source` and `copy`, by new index, and `place`, the new index by copy and offset."""
        inside = self.of(_B)
        runs = np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1) if len(inside) else []
        source, copy, end = [], [], 0
        for run in runs:
            start, stop, n = int(run[0]), int(run[-1]) + 1, len(run)
            numbers = range(self.copies + 1)
            if not self._is_between(start, stop, _A, _C):
                if not self._is_between(start, stop, _C, _A):
                    raise NotRepeatedError("blocks are not next to each other")
                numbers = numbers[::-1]
            source += [np.arange(end, start), *[run] * len(numbers)]
            copy += [np.zeros(start - end, dtype=np.int64)]
            copy += [np.full(n, number) for number in numbers]
            end = stop
        source.append(np.arange(end, len(self.region)))
        copy.append(np.zeros(len(self.region) - end, dtype=np.int64))
        self.source, self.copy = np.concatenate(source), np.concatenate(copy)
        self.moved = np.flatnonzero(self.copy == 0)
        """The new index of each item."""
        self.place = np.zeros((self.copies + 1, len(inside)), dtype=np.int64)
        new = np.flatnonzero(self.region[self.source] == _B)
        self.place[self.copy[new], self.offset[self.source[new]]] = new

    def _is_between(self, start: int, stop: int, earlier: int, later: int) -> bool:
        """Return whether a run of B lies between equal runs of two regions."""
        n = stop - start
        if start < n or stop + n > len(self.region):
            return False
        before, after = slice(start - n, start), slice(stop, stop + n)
        same = self.offset[start:stop]
        return bool(
            (self.region[before] == earlier).all()
            and (self.region[after] == later).all()
            and np.array_equal(self.offset[before], same)
            and np.array_equal(self.offset[after], same)
        )

    def column(self, column: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Return a column, or the rows of a table, with B repeated; it must be as in C."""
        if not np.array_equal(column[self.of(_B)], column[self.of(_C)]):
            raise NotRepeatedError("blocks differ in size")
        return column[self.source]

    def texts(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return texts with B repeated; they must be as in C."""
        if [texts[i] for i in self.of(_B).tolist()] != [texts[i] for i in self.of(_C).tolist()]:
            raise NotRepeatedError("blocks differ in kind")
        return tuple(texts[i] for i in self.source.tolist())


class _Expansion:
    """A graph whose blocks are repeated."""

    def __init__(self, graph: OpGraph, repetition: Repetition, *, has_exact_names: bool) -> None:
        self.old, self.has_exact_names = graph, has_exact_names
        label = _block_of_op(graph.modules, repetition.blocks)
        value_block = np.where(graph.value_producer >= 0, label[graph.value_producer], -1)
        inputs = np.flatnonzero(graph.value_producer < 0)
        input_block = only_user(graph.n_values, graph.reads, label[graph.readers])
        is_read = np.isin(inputs, graph.reads)
        for value, known in zip(inputs.tolist(), is_read.tolist(), strict=True):
            # What a step does not read lies among the other inputs of its block.
            value_block[value] = input_block[value] if known else value_block[value - 1]
        weight_block = only_user(len(graph.weight_names), graph.uses, label[graph.users])
        self.ops = _Items(label, repetition)
        self.values = _Items(value_block, repetition)
        self.weights = _Items(weight_block, repetition)
        self.gradients = _Items(weight_block[graph.gradient_weights], repetition)
        self.unread = _Items(_block_of_op(graph.unread_weight_names, repetition.blocks), repetition)
        if not len(self.ops.of(_B)):
            raise NotRepeatedError("blocks have no operators")

    def graph(self) -> OpGraph:
        """Return the graph with more blocks."""
        old, ops, values, weights = self.old, self.ops, self.values, self.weights
        read_start, reads = self._rows(old.read_start, old.reads, values)
        use_start, uses = self._rows(old.use_start, old.uses, weights)
        producer = _moved(old.value_producer, values, ops)
        names = self._names()
        last_op, is_buffer = old.value_held, old.weight_is_buffer
        return replace(
            old,
            names=names,
            modules=_renamed(old.modules, ops),
            targets=ops.texts(old.targets),
            dtypes=ops.texts(old.dtypes),
            flops=ops.column(old.flops),
            moved_bytes=ops.column(old.moved_bytes),
            group=_moved(old.group, ops, ops),
            value_names=self._value_names(producer, names),
            value_producer=producer,
            value_bytes=values.column(old.value_bytes),
            value_alloc_bytes=values.column(old.value_alloc_bytes),
            value_base=_moved(old.value_base, values, values),
            value_is_output=values.column(old.value_is_output),
            value_held=_moved(last_op, values, ops) if len(last_op) else last_op,
            read_start=read_start,
            reads=reads,
            weight_names=_renamed(old.weight_names, weights),
            weight_bytes=weights.column(old.weight_bytes),
            weight_state_bytes=weights.column(old.weight_state_bytes),
            use_start=use_start,
            uses=uses,
            forward_of=_moved(old.forward_of, ops, ops),
            gradient_values=_moved(old.gradient_values, self.gradients, values),
            gradient_weights=_moved(old.gradient_weights, self.gradients, weights),
            attention=self._attention(),
            weight_is_buffer=weights.column(is_buffer) if len(is_buffer) else is_buffer,
            unread_weight_names=_renamed(old.unread_weight_names, self.unread),
            unread_weight_bytes=self.unread.column(old.unread_weight_bytes),
        )

    def _names(self) -> tuple[str, ...]:
        """Return the names of operators; a recomputed one is named after that of the forward."""
        op_of = {name: op for op, name in enumerate(self.old.names)}
        originals = [
            op_of.get(name.removesuffix(AGAIN), -1) if name.endswith(AGAIN) else -1
            for name in self.old.names
        ]
        of_originals = _moved(np.array(originals, dtype=np.int64), self.ops, self.ops).tolist()
        texts, increments = _numbering(
            [name if op < 0 else AGAIN for name, op in zip(self.old.names, originals, strict=True)]
        )
        if not self.has_exact_names:
            increments = np.minimum(np.abs(increments), 1)
        names = _numbered(self.ops.texts(texts), self.ops.column(increments).tolist())
        names = [
            name if op < 0 else f"{names[op]}{AGAIN}"
            for name, op in zip(names, of_originals, strict=True)
        ]
        if len(set(names)) < len(names):
            raise NotRepeatedError("operators cannot be told apart by name")
        return tuple(names)

    def _value_names(self, producer: IntArray, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of values: those of their operators, with the number of an item."""
        names_of_inputs, items = [], []
        for name, op in zip(self.old.value_names, self.old.value_producer.tolist(), strict=True):
            names_of_inputs.append(name if op < 0 else "")
            items.append("" if op < 0 else name.removeprefix(self.old.names[op]))
        entries = zip(
            producer.tolist(),
            _renamed(names_of_inputs, self.values),
            self.values.texts(items),
            strict=True,
        )
        return tuple(name if op < 0 else f"{names[op]}{item}" for op, name, item in entries)

    def _rows(self, start: IntArray, items: IntArray, kind: _Items) -> tuple[IntArray, IntArray]:
        """Return the starts and items of the operators' lists."""
        lengths = self.ops.column(np.diff(start))
        new_start = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=new_start[1:])
        # The old item and the referring item of each new reference.
        op = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(op)) - new_start[op] + start[self.ops.source[op]]
        return new_start, _moved(items, self.ops, kind, _Rows(start, op, place))

    def _attention(self) -> IntArray:
        if not len(self.old.attention):
            return self.old.attention
        rows = {int(row[0]): row[1:].tolist() for row in self.old.attention}
        rows_b, rows_c = (
            [rows.get(op) for op in self.ops.of(region).tolist()] for region in (_B, _C)
        )
        if rows_b != rows_c:
            raise NotRepeatedError("blocks differ in attention")
        attention = [
            (new, *rows[op]) for new, op in enumerate(self.ops.source.tolist()) if op in rows
        ]
        return np.array(attention, dtype=np.int64).reshape(-1, self.old.attention.shape[1])


def _block_of_op(modules: Sequence[str], blocks: str) -> IntArray:
    """Return the number of the block that each operator is in, -1 for none."""
    number: dict[str, int] = {}
    for module in dict.fromkeys(modules):
        inside = module.removeprefix(f"{blocks}.") if module.startswith(f"{blocks}.") else ""
        first = inside.partition(".")[0]
        number[module] = int(first) if first.isdigit() else -1
    return np.array([number[module] for module in modules], dtype=np.int64)


# References.


class _Rows(NamedTuple):
    """Several references for each item."""

    start: IntArray
    """Starts of the items' references."""
    owner: IntArray
    """The new item of each new reference."""
    place: IntArray
    """The old reference of each new one."""


def _moved(targets: IntArray, items: _Items, kind: _Items, rows: _Rows | None = None) -> IntArray:
    """Return references of `items` to items of `kind`, or -1, with blocks repeated.

    Raises:
        NotRepeatedError: if those of B and C differ, or reach beyond the adjacent period.

    """
    if rows is None:
        count = np.arange(len(targets))
        rows = _Rows(np.arange(len(targets) + 1), np.arange(len(items.source)), items.source)
    else:
        count = np.repeat(np.arange(len(rows.start) - 1), np.diff(rows.start))
    region, is_none = items.region[count], targets < 0
    to = np.where(is_none, _GLOBAL, kind.region[targets])
    is_global = is_none | (to == _GLOBAL) | (to == _BEFORE)
    key = np.where(is_global, -1 - targets, kind.offset[targets])
    step = np.where(is_global, 0, to - region)  # by periods, from B and C
    b, c = region == _B, region == _C
    if not (np.array_equal(step[b], step[c]) and np.array_equal(key[b], key[c])):
        raise NotRepeatedError("blocks differ in what they refer to")
    to_next = ~is_none & kind.is_next[targets]
    if _crosses(region, to, to_next).any():
        raise NotRepeatedError("blocks refer to blocks far from them")
    # Arrays over the new references.
    target, copy = targets[rows.place], items.copy[rows.owner]
    from_b = region[rows.place] == _B
    beside = copy + step[rows.place]
    in_copies = from_b & ~is_global[rows.place] & (beside >= 0) & (beside <= kind.copies)
    new = np.where(target < 0, -1, kind.moved[target])
    new[in_copies] = kind.place[beside[in_copies], key[rows.place][in_copies]]
    # C follows the last copy.
    to_last = (region[rows.place] == _C) & (to[rows.place] == _B)
    new[to_last] = kind.place[-1, key[rows.place][to_last]]
    return new


def _crosses(
    region: IntArray, to: IntArray, to_next: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return whether each reference between regions would cross the inserted periods.

    `to_next` marks references to the period after C.
    """
    crosses: npt.NDArray[np.bool_] = np.select(
        [region == _B, region == _C, region == _AFTER, region == _A],
        [
            to == _AFTER,
            (to == _A) | ((to == _AFTER) & ~to_next),
            (to == _A) | (to == _B),
            to == _C,
        ],
        (to == _B) | (to == _C),
    )
    return crosses


# Names.


def _numbering(names: Sequence[str]) -> tuple[list[str], IntArray]:
    """Return the names without their last numbers, and the increments of these by text.

    `torch.export` numbers operators by their targets' names, and omits some of them later.
    """
    texts, increments, last = [], [], dict[str, int]()
    for name in names:
        text = _LAST_NUMBER.sub("", name)
        number = int(name[len(text) + 1 :] or 0)
        texts.append(text)
        increments.append(number - last.get(text, 0))
        last[text] = number
    return texts, np.array(increments, dtype=np.int64)


def _numbered(texts: Sequence[str], increments: Sequence[int]) -> list[str]:
    """Return names for `_numbering`."""
    names, last = [], dict[str, int]()
    for text, increment in zip(texts, increments, strict=True):
        number = last[text] = last.get(text, 0) + increment
        names.append(f"{text}_{number}" if number else text)
    return names


def _renamed(names: Sequence[str], items: _Items) -> tuple[str, ...]:
    """Return the names with B repeated, whose numbers grow from period to period."""
    growth = _growth(names, items)
    is_later = np.isin(items.region, (_C, _AFTER))
    renamed = []
    for old, copy in zip(items.source.tolist(), items.copy.tolist(), strict=True):
        texts, numbers = _split(names[old])
        periods = items.copies if is_later[old] else copy
        steps = growth.get(texts, [0] * len(numbers))
        grown = [n + periods * step for n, step in zip(numbers, steps, strict=True)]
        renamed.append(
            texts[0] + "".join(f"{n}{text}" for n, text in zip(grown, texts[1:], strict=True))
        )
    return tuple(renamed)


def _growth(names: Sequence[str], items: _Items) -> dict[tuple[str, ...], list[int]]:
    """Return the growth of each number from A to B, and from B to C, by a name's text."""
    growth: dict[tuple[str, ...], list[int]] = {}
    periods = (items.of(region).tolist() for region in (_A, _B, _C))
    for a, b, c in zip(*periods, strict=True):
        (text_a, low), (texts, middle), (text_c, high) = map(_split, (names[a], names[b], names[c]))
        steps = [new - old for old, new in zip(middle, high, strict=False)]
        before = [new - old for old, new in zip(low, middle, strict=False)]
        if text_a != texts or texts != text_c or steps != before:
            raise NotRepeatedError(f"{names[b]} and {names[c]} are not named alike")
        if growth.setdefault(texts, steps) != steps:
            raise NotRepeatedError(f"{names[c]} is numbered irregularly")
    return growth


def _split(name: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the text of a name without its numbers, and the numbers."""
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), [int(number) for number in parts[1::2]]
