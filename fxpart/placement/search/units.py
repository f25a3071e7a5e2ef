"""Units that move together: operators that share a device, and modules around them."""

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray, OpGraph

__all__ = [
    "Units",
    "atomic_units",
    "contiguous_units",
    "module_units",
    "stretch_of_operators",
    "working_units",
]

Units = tuple[IntArray, IntArray]
"""CSR: unit u is the operators ``ops[start[u]:start[u + 1]]``; units and operators in order."""


NEAR = 32
"""Largest distance between a view and its producer for the two to move together."""


def atomic_units(graph: OpGraph) -> Units:
    """Return the smallest units: the groups, in order of their first operators."""
    return _units_by_label(graph, np.arange(graph.n_ops))


def working_units(graph: OpGraph, works: npt.NDArray[np.bool_]) -> Units:
    """Return units of one operator group that takes time (`works`) and the free ones after it.

    An operator that takes no time (a view) joins the producer of its first operand if that is near:
    a unit that spans much of the model is expensive to move, and would tie its ends together.
    """
    label = np.arange(graph.n_ops)
    for op in np.flatnonzero(~works):
        makers = graph.value_producer[graph.reads_of(int(op))]
        if len(makers) and max(makers[0], op - NEAR) == makers[0]:
            label[op] = label[graph.group[makers[0]]]
    return _units_by_label(graph, label)


def contiguous_units(graph: OpGraph) -> Units:
    """Return the shortest stretches of operators in graph order that do not divide any group.

    In a training step these are stretches of the forward with their backward operators, since each
    group of the forward extends into the backward.
    """
    stretch = stretch_of_operators(graph)
    starts = np.zeros(int(stretch.max()) + 2, dtype=np.int64)
    np.cumsum(np.bincount(stretch), out=starts[1:])
    return starts, np.argsort(stretch, kind="stable").astype(np.int64)


def stretch_of_operators(graph: OpGraph) -> IntArray:
    """Return the index of each operator's stretch in `contiguous_units`. Length n."""
    count, position = graph.n_ops, graph.forward_of
    group_start = np.full(count, count, dtype=np.int64)
    np.minimum.at(group_start, graph.group, position)
    last = np.arange(count)
    np.maximum.at(last, group_start[graph.group], position)
    # A stretch ends where all groups that began in it have ended.
    ends = np.maximum.accumulate(last) == np.arange(count)
    stretch_of_position = np.concatenate([[0], np.cumsum(ends)[:-1]])
    _, stretch_of = np.unique(stretch_of_position[position], return_inverse=True)
    return stretch_of.astype(np.int64)


def module_units(graph: OpGraph) -> list[Units]:
    """Return units of whole modules, coarsest first, for each depth of the module tree.

    A unit is a run of consecutive operators in one module. Depths that divide nothing further are
    skipped.
    """
    paths = [path.split(".") if path else [] for path in graph.modules]
    deepest = max(map(len, paths), default=0)
    levels: list[Units] = []
    count = 1
    for depth in range(1, deepest + 1):
        prefixes = [".".join(path[:depth]) for path in paths]
        change = [a != b for a, b in zip(prefixes[1:], prefixes[:-1], strict=True)]
        units = _units_by_label(graph, np.concatenate([[0], np.cumsum(change)]).astype(np.int64))
        if len(units[0]) - 1 > count:
            levels.append(units)
            count = len(units[0]) - 1
    return levels


def _units_by_label(graph: OpGraph, label: IntArray) -> Units:
    """Return units of operators by the label of their group's first operator."""
    group_label = label[graph.group]
    _, first, unit_of = np.unique(group_label, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")[unit_of]
    starts = np.zeros(len(first) + 1, dtype=np.int64)
    np.cumsum(np.bincount(rank, minlength=len(first)), out=starts[1:])
    return starts, np.argsort(rank, kind="stable").astype(np.int64)
