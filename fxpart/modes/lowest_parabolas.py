"""Which of many parabolas is lowest at each of a row of places, each there on a stretch of them.

A Li Chao tree over the places: two of the parabolas differ by a straight line, so they cross once
at most, and a node need keep only the one that is lower in its middle; the other may be lower on
one side of it, and goes there.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray

__all__ = ["lowest_parabolas"]


@compiled
def lowest_parabolas(  # noqa: PLR0917 - compiled code takes no keywords
    x: FloatArray,
    first: IntArray,
    last: IntArray,
    rank: IntArray,
    base: FloatArray,
    apex: FloatArray,
) -> IntArray:
    """Return which of L parabolas is lowest at each of P places; -1 where there is none.

    Parabola i is ``base[i] + (x - apex[i]) ** 2``. One of higher rank counts as lower wherever both
    are; of equals it is the first. O(L log^2 P + P log P).

    Args:
        x: of each place, in order, not falling. Length P.
        first: the first place of each parabola. Length L.
        last: the last one, not before `first`. Length L.
        rank: of each parabola. Length L.
        base: of each parabola. Length L.
        apex: of each parabola. Length L.

    """
    count = x.shape[0]
    size = 1
    while size < count:
        size *= 2
    tree = np.full(2 * size, -1, dtype=np.int64)
    for i in range(first.shape[0]):
        # The stretch as nodes of the tree, from the narrowest on.
        left, right, width = first[i] + size, last[i] + size + 1, 1
        while left < right:
            if left & 1:
                _sink(tree, left, left * width - size, width, i, x, rank, base, apex)
                left += 1
            if right & 1:
                right -= 1
                _sink(tree, right, right * width - size, width, i, x, rank, base, apex)
            left, right, width = left // 2, right // 2, 2 * width
    found = np.empty(count, dtype=np.int64)
    for place in range(count):
        best, node = -1, place + size
        while node:
            if tree[node] >= 0 and _lower(tree[node], best, x[place], rank, base, apex):
                best = tree[node]
            node //= 2
        found[place] = best
    return found


@compiled
def _lower(  # noqa: PLR0917 - compiled code takes no keywords
    one: int, other: int, x: float, rank: IntArray, base: FloatArray, apex: FloatArray
) -> bool:
    """Return whether `one` goes before `other`, which is -1 for none, at `x`."""
    if other < 0:
        return True
    if rank[one] != rank[other]:
        return bool(rank[one] > rank[other])
    mine = base[one] + (x - apex[one]) ** 2
    its = base[other] + (x - apex[other]) ** 2
    return bool(mine < its or (mine == its and one < other))


@compiled
def _sink(  # noqa: PLR0917 - compiled code takes no keywords
    tree: IntArray,
    node: int,
    begin: int,
    width: int,
    new: int,
    x: FloatArray,
    rank: IntArray,
    base: FloatArray,
    apex: FloatArray,
) -> None:
    """Put `new` where it is lowest below `node`, whose places are `width` from `begin` on."""
    while True:
        if _lower(new, tree[node], x[begin + width // 2], rank, base, apex):
            tree[node], new = new, tree[node]
        if new < 0 or width == 1:
            return
        # What lost in the middle can win on one side only.
        width //= 2
        if _lower(new, tree[node], x[begin], rank, base, apex):
            node = 2 * node
        elif _lower(new, tree[node], x[begin + 2 * width - 1], rank, base, apex):
            node, begin = 2 * node + 1, begin + width
        else:
            return
