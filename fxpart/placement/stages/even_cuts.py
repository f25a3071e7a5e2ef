"""Find the most even of the allowed cuts: the smallest sum of squares of stage times.

The time of a stage is its load plus the time to receive everything that crosses the cut before it.
With x as the load of all units before a cut, a stage's contribution to the sum is a parabola in the
x of its end, so the best begin for each end is found without trying all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.placement.stages.line import StageLine
from fxpart.support.compiled import compiled

__all__ = ["BoolArray", "alike_links", "lowest_parabolas", "most_even"]

BoolArray = npt.NDArray[np.bool_]


# Lower envelope of parabolas, each defined on a range of places, by a Li Chao tree: two parabolas
# differ by a linear function and so cross at most once; a node keeps the one that is lower at its
# midpoint and passes the other to the side where it may be lower.


@compiled
def lowest_parabolas(  # noqa: PLR0917 - compiled code takes no keywords
    x: FloatArray,
    first: IntArray,
    last: IntArray,
    rank: IntArray,
    base: FloatArray,
    apex: FloatArray,
) -> IntArray:
    """Return the lowest of L parabolas at each of P places; -1 for none.

    Parabola i is ``base[i] + (x - apex[i]) ** 2``. A higher rank takes precedence wherever both are
    defined; ties go to the first. O(L log^2 P + P log P).

    Args:
        x: coordinates of the places, non-decreasing. Length P.
        first: the first place of each parabola. Length L.
        last: the last place of each parabola, not before `first`. Length L.
        rank: rank of each parabola. Length L.
        base: minimum of each parabola. Length L.
        apex: coordinate of the minimum of each parabola. Length L.

    """
    count = x.shape[0]
    size = 1
    while size < count:
        size *= 2
    tree = np.full(2 * size, -1, dtype=np.int64)
    for i in range(first.shape[0]):
        # Decompose the range into nodes of the tree, from the narrowest on.
        left, right, width = first[i] + size, last[i] + size + 1, 1
        while left < right:
            if left & 1:
                _sink(tree, left, left * width - size, width, i, x, rank, base, apex)
                left += 1
            if right & 1:
                right -= 1
                _sink(tree, right, right * width - size, width, i, x, rank, base, apex)
            left, right, width = left // 2, right // 2, 2 * width
    lowest = np.empty(count, dtype=np.int64)
    for position in range(count):
        best, node = -1, position + size
        while node:
            if tree[node] >= 0 and _lower(tree[node], best, x[position], rank, base, apex):
                best = tree[node]
            node //= 2
        lowest[position] = best
    return lowest


@compiled
def _lower(  # noqa: PLR0917 - compiled code takes no keywords
    first: int, other: int, x: float, rank: IntArray, base: FloatArray, apex: FloatArray
) -> bool:
    """Return whether `first` is preferred to `other` (-1 for none) at `x`."""
    if other < 0:
        return True
    if rank[first] != rank[other]:
        return bool(rank[first] > rank[other])
    first_value = base[first] + (x - apex[first]) ** 2
    other_value = base[other] + (x - apex[other]) ** 2
    return bool(first_value < other_value or (first_value == other_value and first < other))


@compiled
def lowest_allowed(  # noqa: PLR0917 - compiled code takes no keywords
    x: FloatArray,
    first: IntArray,
    last: IntArray,
    rank: IntArray,
    base: FloatArray,
    apex: FloatArray,
    allowed: BoolArray,
) -> IntArray:
    """Return `lowest_parabolas` with parabola i restricted to allowed positions. O(L P).

    `allowed` is indexed by ``first[i] - 1`` and position.
    """
    chosen = np.full(x.shape[0], -1, dtype=np.int64)
    for position in range(x.shape[0]):
        for i in range(first.shape[0]):
            holds = first[i] <= position <= last[i] and allowed[first[i] - 1, position]
            if holds and _lower(i, chosen[position], x[position], rank, base, apex):
                chosen[position] = i
    return chosen


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
    """Insert `new` into the subtree of `node`, which covers `width` places from `begin` on."""
    while True:
        if _lower(new, tree[node], x[begin + width // 2], rank, base, apex):
            tree[node], new = new, tree[node]
        if new < 0 or width == 1:
            return
        # The loser at the midpoint can win on one side only.
        width //= 2
        if _lower(new, tree[node], x[begin], rank, base, apex):
            node = 2 * node
        elif _lower(new, tree[node], x[begin + 2 * width - 1], rank, base, apex):
            node, begin = 2 * node + 1, begin + width
        else:
            return


_NONE = int(np.iinfo(np.int64).min)


class _Divisions(NamedTuple):
    """The best division up to each cut with the last stage on one slot. Length U + 1 each."""

    rank: IntArray
    """Higher is better: the number of stages or minus it; `_NONE` if there is no division."""
    squares: FloatArray
    """Sum of the squares of their times; infinite if there is no division."""
    begin: IntArray
    """Begin of the last stage."""
    before: IntArray
    """Slot of the previous stage; -1 for none."""


class _Begins(NamedTuple):
    """Possible begins of a stage. Length L each."""

    cut: IntArray
    rank: IntArray
    squares: FloatArray
    receive_s: FloatArray
    before: IntArray

    def at(self, rows: IntArray) -> "_Begins":
        """Return a subset."""
        cut, rank, squares, receive_s, before = self
        return _Begins(cut[rows], rank[rows], squares[rows], receive_s[rows], before[rows])


def most_even(
    line: StageLine,
    devices: Sequence[int],
    limits: Sequence[IntArray],
    *,
    may_skip: bool,
    prefer_more: bool = False,
    link_bound_s: float = np.inf,
    allowed: BoolArray | None = None,
) -> list[tuple[int, int, int]]:
    """Return begin, end and slot of each stage.

    The result has the fewest stages (or the most), then the smallest sum of squares; exact ties go
    to the earliest begins, from the last stage to the first. O(S U log^2 U) for S slots; if these
    may stay empty, times the number of kinds of links.

    Args:
        line: the row of U units.
        devices: device of each slot.
        limits: for each slot, the furthest end of a stage from each cut, or the cut itself if none
            may begin there. Length U + 1 each. They must be feasible.
        may_skip: whether a slot may stay empty.
        prefer_more: whether more stages are better than fewer.
        link_bound_s: largest load of a link at a cut.
        allowed: allowed ends (columns) of a stage from each cut (rows); None for any. Shape (U + 1,
            U + 1).

    """
    divisions: list[_Divisions] = []
    for slot, limit in enumerate(limits):
        begins = _begins_after(line, devices, divisions, link_bound_s, may_skip=may_skip)
        load_before_s, step = line.load_before_s[devices[slot]], 1 if prefer_more else -1
        divisions.append(_extend(load_before_s, limit, begins, allowed, step))
    last = range(len(divisions)) if may_skip else [len(divisions) - 1]
    slot = min(last, key=lambda s: (-int(divisions[s].rank[-1]), float(divisions[s].squares[-1])))
    stretches, end = [], line.n_units
    while slot >= 0:
        begin = int(divisions[slot].begin[end])
        stretches.append((begin, end, slot))
        slot, end = int(divisions[slot].before[end]), begin
    return stretches[::-1]


def _begins_after(
    line: StageLine,
    devices: Sequence[int],
    divisions: list[_Divisions],
    link_bound_s: float,
    *,
    may_skip: bool,
) -> _Begins:
    """Return the possible begins of a stage on the slot after those of `divisions`, by cut."""
    slot, none = len(divisions), np.zeros(1, dtype=np.int64)
    parts: list[_Begins] = []
    if may_skip or not slot:
        parts.append(_Begins(none, none, np.zeros(1), np.zeros(1), none - 1))
    # With equal links only the best slot matters.
    for slots in alike_links(line, devices, slot, may_skip=may_skip):
        source = devices[slots[0]]
        may_begin = line.link_s(source, devices[slot]) <= link_bound_s
        parts.append(_best_of(divisions, slots, line.receive_s(source, devices[slot]), may_begin))
    joined = _Begins(*map(np.concatenate, zip(*parts, strict=True)))
    return joined.at(np.argsort(joined.cut, kind="stable"))


def alike_links(
    line: StageLine, devices: Sequence[int], slot: int, *, may_skip: bool
) -> list[list[int]]:
    """Return the slots from which a stage on `slot` may receive, grouped by equal links."""
    first = 0 if may_skip else max(0, slot - 1)
    sources, target = list(devices[first:slot]), devices[slot]
    tables = (line.s_per_byte, line.link_latency_s)
    rows = np.array([row for t in tables for row in (t[sources, target], t[target, sources])])
    if (rows == rows[:, :1]).all():
        return [list(range(first, slot))] if sources else []
    _, group_of = np.unique(rows, axis=1, return_inverse=True)
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_of.reshape(-1).tolist()):
        groups.setdefault(group, []).append(first + index)
    return list(groups.values())


def _best_of(
    divisions: list[_Divisions], slots: list[int], receive_s: FloatArray, may_begin: BoolArray
) -> _Begins:
    """Return the best division up to each cut ending on one of `slots`; ties go to the first."""
    rank, squares = divisions[slots[0]].rank, divisions[slots[0]].squares
    before = np.full(len(rank), slots[0], dtype=np.int64)
    for slot in slots[1:]:
        division = divisions[slot]
        more_even = (division.rank == rank) & (division.squares < squares)
        better = (division.rank > rank) | more_even
        rank = np.where(better, division.rank, rank)
        squares = np.where(better, division.squares, squares)
        before = np.where(better, slot, before)
    cut = np.flatnonzero((rank > _NONE) & may_begin)
    return _Begins(cut, rank[cut], squares[cut], receive_s[cut], before[cut])


def _extend(
    load_before_s: FloatArray,
    limit: IntArray,
    begins: _Begins,
    allowed: BoolArray | None,
    step: int,
) -> _Divisions:
    """Return the best division up to each cut with one more stage, which ends within `limit`.

    The stage changes the rank by `step`.
    """
    begins = begins.at(np.flatnonzero(limit[begins.cut] > begins.cut))
    parabolas = (
        load_before_s,
        begins.cut + 1,
        limit[begins.cut],
        begins.rank,
        begins.squares,
        load_before_s[begins.cut] - begins.receive_s,
    )
    if allowed is None:
        chosen = lowest_parabolas(*parabolas)
    else:
        chosen = lowest_allowed(*parabolas, allowed)
    open_cuts, count = np.flatnonzero(chosen >= 0), len(limit)
    origin = chosen[open_cuts]
    rank, squares = np.full(count, _NONE, dtype=np.int64), np.full(count, np.inf)
    begin, before = np.full((2, count), -1, dtype=np.int64)
    begin[open_cuts], before[open_cuts] = begins.cut[origin], begins.before[origin]
    rank[open_cuts] = begins.rank[origin] + step
    time_s = load_before_s[open_cuts] - load_before_s[begin[open_cuts]] + begins.receive_s[origin]
    squares[open_cuts] = begins.squares[origin] + time_s**2
    return _Divisions(rank, squares, begin, before)
