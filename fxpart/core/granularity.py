"""How finely a model may be cut: operators that may part, or whole modules that stay together.

A plan of whole modules can be read and carried out by people; a plan of single operators can be
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
"""``operator``: as captured. ``module``: each innermost module whole. A depth may be given too."""


def depth_of(granularity: str | int) -> int | None:
    """Return the depth that `granularity` is, or None where it is one of `GRANULARITIES`.

    Raises:
        SpecError: for anything else.

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
    paths) together. Depth d keeps together the operators whose paths have the same first d parts;
    operators of a module above that depth, only where they are next to each other in graph order.
    Groups that the graph has already are kept whole: what they touch becomes one. Checks of a
    result (`OpGraph.is_check`) count as part of the module whose result they check, not of the one
    that they stand in: else the check of its input would tie every layer to the one before.

    Raises:
        SpecError: for a granularity that does not exist.

    """
    depth = depth_of(granularity)
    if str(granularity) == "operator":
        return graph
    labels = _labels(graph, depth, np.flatnonzero(~graph.is_check).tolist())
    return replace(graph, group=join_groups(graph.group, labels))


def _labels(graph: OpGraph, depth: int | None, operators: list[int]) -> IntArray:
    """Return for each of `operators` the first one that stays with it, for others themselves.

    Without `depth`, those of equal paths stay together.
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
    """Return the finest groups that keep both groupings whole, named by their first operator.

    Each of the two names for every operator one that it stays with, not after it. Length n.
    """
    pairs = itertools.chain(enumerate(group.tolist()), enumerate(labels.tolist()))
    return np.array(first_of_each(len(group), pairs), dtype=np.int64)


def first_of_each(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each of `count` items the first that `pairs` join it with, at any remove.

    A union-find of its own: scipy or networkx would add half a second to every capture.
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


# Levels of capture, checked here so that a wrong choice is refused before torch is loaded.

LEVELS = ("operator", "module")
"""``operator``: `torch.export`, any model. ``module``: `torch.fx.symbolic_trace`, plain ones."""


def check_level(level: str) -> None:
    """Raise `SpecError` for a level that does not exist."""
    if level not in LEVELS:
        raise SpecError(f"capture.level={level} does not exist; {nearest_names(level, LEVELS)}")
