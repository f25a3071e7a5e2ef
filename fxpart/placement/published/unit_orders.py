"""Orders of a model's units whose stretches are good candidates."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray

__all__ = ["rows"]

_RANDOM_ROWS = 4


def rows(
    sources: IntArray,
    targets: IntArray,
    is_backward: npt.NDArray[np.bool_],
    unit_of: IntArray,
    seed: int = 0,
) -> Iterator[IntArray]:
    """Yield topological orders (for the forward) of all units.

    The orders are that of the graph, and depth-first post-orders from the sinks, in which operands
    come right before their reader. Edges go from `sources` to `targets`, in graph order; a unit is
    at the position of its first operator.
    """
    n = len(unit_of)
    forward = ~is_backward
    inside = forward[sources] & forward[targets]
    edges = sources[inside], targets[inside]
    number = np.arange(n, dtype=np.int64)
    yield _units(number, is_backward, unit_of)
    random = np.random.default_rng(seed)
    ranks = [number, -number, *(random.permutation(n) for _ in range(_RANDOM_ROWS))]
    for rank in ranks:
        yield _units(_depth_first(*edges, rank), is_backward, unit_of)


def _units(order: IntArray, is_backward: npt.NDArray[np.bool_], unit_of: IntArray) -> IntArray:
    late = order[np.argsort(is_backward[order], kind="stable")]
    units, first = np.unique(unit_of[late], return_index=True)
    return np.asarray(units[np.argsort(first)], dtype=np.int64)


def _depth_first(sources: IntArray, targets: IntArray, rank: IntArray) -> IntArray:
    """Return operators in depth-first post-order of their operands, lowest `rank` first."""
    n = len(rank)
    reads: list[list[int]] = [[] for _ in range(n)]
    is_read = np.zeros(n, dtype=np.bool_)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        reads[target].append(source)
        is_read[source] = True
    for row in reads:
        row.sort(key=lambda op: int(rank[op]))
    seen = np.zeros(n, dtype=np.bool_)
    order: list[int] = []
    for root in np.lexsort((rank, is_read)).tolist():
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, 0)]
        while stack:
            op, done = stack.pop()
            if done == len(reads[op]):
                order.append(op)
                continue
            stack.append((op, done + 1))
            read = reads[op][done]
            if not seen[read]:
                seen[read] = True
                stack.append((read, 0))
    return np.array(order, dtype=np.int64)
