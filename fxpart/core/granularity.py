"""Granularity of a placement: single operators, or whole modules.

A plan of whole modules is readable and can be applied by hand; a plan of single operators can be
faster, and can fit where whole modules do not.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "GRANULARITIES",
    "LEVELS",
    "check_level",
    "depth_of",
    "first_of_each",
    "group_operators",
    "join_groups",
]


GRANULARITIES = ("operator", "module")
"""``operator``: as captured. ``module``: each innermost module whole. A depth is also allowed."""


def depth_of(granularity: str | int) -> int | None:
    """Return `granularity` as a depth, or None if it is one of `GRANULARITIES`.

    Raises:
        SpecError: if it is neither.

    """
    text = str(granularity)
    if text in GRANULARITIES:
        return None
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise SpecError(
        f"granularity={text} does not exist; {nearest_names(text, GRANULARITIES)}; or a depth in"
        " the module tree: 1, 2, 3"
    )


def group_operators(graph: OpGraph, granularity: str | int) -> OpGraph:
    """Return `graph` with `group` coarsened, so that larger parts of the model share a device.

    ``operator`` changes nothing. ``module`` keeps the operators of one innermost module (equal
    paths) together. Depth d keeps together the operators whose paths share their first d parts;
    operators of a module above that depth stay together only if consecutive. Existing groups are
    kept whole, so groups that they overlap are merged. Checks of a result (`OpGraph.is_check`)
    belong to the module whose result they check, not to the enclosing one: otherwise the check of a
    layer's input would tie it to the previous layer.

    Raises:
        SpecError: if the granularity does not exist.

    """
    depth = depth_of(granularity)
    if str(granularity) == "operator":
        return graph
    labels = _labels(graph, depth, np.flatnonzero(~graph.is_check).tolist())
    return replace(graph, group=join_groups(graph.group, labels))


def _labels(graph: OpGraph, depth: int | None, operators: list[int]) -> IntArray:
    """Return the first operator of the group of each of `operators`; others label themselves.

    Without `depth`, operators with equal paths form a group.
    """
    first: dict[tuple[str, ...], int] = {}
    labels = np.arange(graph.n_ops)
    before = operators[0]
    for op in operators:
        path = graph.modules[op]
        parts = tuple(path.split(".")) if path else ()
        if depth is None or len(parts) >= depth:
            labels[op] = first.setdefault(parts[:depth], op)
        elif path == graph.modules[before]:
            labels[op] = labels[before]
        before = op
    return labels


def join_groups(group: IntArray, labels: IntArray) -> IntArray:
    """Return the finest grouping coarser than both, labelled by the first operator of each group.

    Both arguments map each operator to one of its group that is not after it. Length n.
    """
    # Most operators are alone.
    joined = [np.flatnonzero(column != np.arange(len(column))) for column in (group, labels)]
    pairs = itertools.chain(
        *(
            zip(ops.tolist(), column[ops].tolist(), strict=True)
            for ops, column in zip(joined, (group, labels), strict=True)
        )
    )
    return np.array(first_of_each(len(group), pairs), dtype=np.int64)


def first_of_each(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the first item of the connected component of each of `count` items under `pairs`.

    This is a hand-written union-find: importing scipy or networkx would add half a second to every
    capture.
    """
    parent = list(range(count))

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for first, second in pairs:
        a, b = root(first), root(second)
        parent[max(a, b)] = min(a, b)
    return [root(item) for item in range(count)]


# Capture levels, checked here so that a wrong choice is refused before torch is imported.

LEVELS = ("operator", "module")
"""``operator``: `torch.export`, any model. ``module``: `torch.fx.symbolic_trace`, simple models."""


def check_level(level: str) -> None:
    """Raise `SpecError` if the level does not exist."""
    if level not in LEVELS:
        raise SpecError(f"capture.level={level} does not exist; {nearest_names(level, LEVELS)}")
