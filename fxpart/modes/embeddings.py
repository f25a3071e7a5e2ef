"""Which operators of a graph look up embeddings, and what goes with them."""

import itertools
import re

import numpy as np
import numpy.typing as npt

from fxpart.graph import IntArray, OpGraph

__all__ = ["embedding_units", "looks_up"]

_LOOKUP = re.compile(
    r"(?:aten\.)?_?embedding(?:_bag)?(?:_forward_only|_renorm_?)?(?:\.\w+)?|Embedding(?:Bag)?"
)
"""Operators of torch, functions, and module classes where whole modules are captured."""


def looks_up(target: str) -> bool:
    """Return whether an operator that calls `target` looks up rows of an embedding table."""
    return _LOOKUP.fullmatch(target) is not None


def embedding_units(graph: OpGraph) -> list[IntArray]:
    """Return the operators that belong with each embedding table, in order of the first lookup.

    A unit is the lookups that share a table, what must share a device with them, and operators
    without weights that make nothing but indices for them out of inputs of the model. Empty when
    there is no lookup.
    """
    unit_of = _units_by_table(graph)
    _add_preparation(graph, unit_of)
    by_unit = np.argsort(unit_of, kind="stable")
    starts = np.searchsorted(unit_of[by_unit], np.arange(int(unit_of.max()) + 2))
    return [by_unit[first:end] for first, end in itertools.pairwise(starts)]


def _units_by_table(graph: OpGraph) -> IntArray:
    """Return the unit of each operator, -1 for dense ones; numbered by their first lookup."""
    parent: dict[int, int] = {}

    def root(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    first_use: dict[int, int] = {}
    for op in range(graph.n_ops):
        if not looks_up(graph.targets[op]):
            continue
        group = int(graph.group[op])
        parent.setdefault(group, group)
        for weight in graph.uses_of(op).tolist():
            other = root(first_use.setdefault(weight, group))
            mine = root(group)
            # Earlier groups stay the roots.
            parent[max(mine, other)] = min(mine, other)
    number = {group: i for i, group in enumerate(sorted({root(group) for group in parent}))}
    unit = [number[root(g)] if g in parent else -1 for g in graph.group.tolist()]
    return np.array(unit, dtype=np.int64)


def _add_preparation(graph: OpGraph, unit_of: IntArray) -> None:
    """Give operators that prepare indices to the unit that they are for, in `unit_of`."""
    wanted = _only_for_one_unit(graph, unit_of)
    alone = np.bincount(graph.group, minlength=graph.n_ops)[graph.group] == 1
    for op in np.flatnonzero((wanted >= 0) & alone).tolist():
        makers = [int(graph.value_producer[value]) for value in graph.reads_of(op)]
        if all(maker < 0 or unit_of[maker] == wanted[op] for maker in makers):
            unit_of[op] = wanted[op]


def _only_for_one_unit(graph: OpGraph, unit_of: IntArray) -> IntArray:
    """Return for each dense operator without weights the only unit that reads from it, else -1.

    Directly, or through other such operators.
    """
    none, several = -1, -2
    reader_unit = np.full(graph.n_ops, none, dtype=np.int64)
    outputs: npt.NDArray[np.int64] = graph.value_producer[graph.value_is_output]
    reader_unit[outputs[outputs >= 0]] = several
    found = np.full(graph.n_ops, none, dtype=np.int64)
    for op in range(graph.n_ops - 1, -1, -1):
        if unit_of[op] < 0 and len(graph.uses_of(op)) == 0 and reader_unit[op] >= 0:
            found[op] = reader_unit[op]
        mine = unit_of[op] if unit_of[op] >= 0 else found[op]
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            if maker >= 0:
                fresh = reader_unit[maker] == none and mine >= 0
                same = fresh or reader_unit[maker] == mine
                reader_unit[maker] = mine if same and mine >= 0 else several
    return found
