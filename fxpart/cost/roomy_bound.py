"""A latency that no placement beats: devices with room for large results have little for weights.

While an operator runs, its device holds what it reads and makes, beside all weights that lie there.
Take the operators that need `large_bytes` for that or more: the devices that run any, called roomy
here, have at most their memory less `large_bytes` for weights. Where all weights together leave
room for a few such devices only, other operators with weights must lie elsewhere, and what passes
between them and the large ones is sent. Along the longest path each section between two gates
(`fxpart.cost.memory_bound`) is then placed in every way on two classes of devices, roomy and
others, with transfers between the classes alone; the room for weights on roomy devices is shared
between sections by a price (Lagrangian relaxation; Geoffrion, Mathematical Programming Study 2,
1974, doi:10.1007/BFb0120690).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.memory_bound import Edges, Sections
from fxpart.cost.possible_times import transient_bytes
from fxpart.cost.problem import Problem
from fxpart.support.compiled import compiled, inlined

__all__ = ["roomy_bound_s"]

BoolArray = npt.NDArray[np.bool_]

_MOST_PLACED = 8
"""Operators of a section that are placed; the others of it lie wherever is best for each path."""
_MOST_SIZES = 6
"""Least sizes of what counts as large that are tried."""
_PRICES = 32
"""Prices tried for one size."""


class _Classes(NamedTuple):
    """What is placed on the two classes. n operators, G gates."""

    is_large: BoolArray
    """Length n: runs on a roomy device."""
    weight_bytes: FloatArray
    """Of each operator: weights that no operator before it uses. Length n."""
    is_placed: BoolArray
    """Length n: large or with weights, as many of each section as are placed; and all gates."""


class _Choices(NamedTuple):
    """The ways to place each section, from ``start[k]`` to ``start[k + 1]`` for that of gate k."""

    start: IntArray
    ends: IntArray
    """2 x class of the gate before + class of the gate, where 1 is roomy."""
    seconds: FloatArray
    """From gate to gate at least."""
    roomy_bytes: FloatArray
    """Weights on roomy devices."""


def roomy_bound_s(
    problem: Problem, edges: Edges, sections: Sections, time_s: FloatArray, cheapest_s: FloatArray
) -> float:
    """Return a latency in seconds that no placement beats that fits, 0 where memory is not short.

    Args:
        problem: a graph on several devices.
        edges: what each operator comes after.
        sections: those along the longest path.
        time_s: of each operator on its fastest device.
        cheapest_s: of a transfer of each value on the fastest link.

    """
    graph, memory = problem.graph, np.sort(problem.topology.memory_bytes)[::-1]
    needs, weight_bytes = transient_bytes(problem), _first_used_bytes(problem)
    spare_bytes = int(memory.sum()) - int(weight_bytes.sum())
    largest_bytes = int(needs.max(initial=0))
    # Not every device has so many bytes beside the weights.
    not_all = needs * (len(memory) - 1) > spare_bytes - largest_bytes
    sizes = np.unique(needs[not_all & (needs > 0)])[::-1]
    best_s = 0.0
    for large_bytes in sizes[:: max(1, -(-len(sizes) // _MOST_SIZES))].tolist():
        # One of them runs what needs most.
        roomy = 1 + max(0, spare_bytes - largest_bytes) // large_bytes
        further_bytes = np.maximum(memory[1:roomy] - large_bytes, 0).sum()
        room_bytes = float(max(0, memory[0] - largest_bytes) + further_bytes)
        is_large = needs >= large_bytes
        is_placed = _placed(sections, is_large, weight_bytes)
        classes = _Classes(is_large, weight_bytes, is_placed)
        by_section, starts = _by_section(sections, graph.n_ops)
        choices = _choices(edges, sections.gate, classes, by_section, starts, time_s, cheapest_s)
        best_s = max(best_s, float(_priced_s(choices, room_bytes)))
    return best_s + float(time_s[sections.gate[0]]) if best_s > 0 else 0.0


def _first_used_bytes(problem: Problem) -> FloatArray:
    """Return the bytes of the weights that each operator is the first to use. Length n."""
    graph = problem.graph
    first = np.full(len(problem.memory.weight_bytes), graph.n_ops, dtype=np.int64)
    np.minimum.at(first, graph.uses, graph.users)
    of_op = np.zeros(graph.n_ops + 1)
    np.add.at(of_op, first, problem.memory.weight_bytes)
    return of_op[:-1]


def _by_section(sections: Sections, n: int) -> tuple[IntArray, IntArray]:
    """Return the operators section by section, in graph order, and where each begins."""
    inside = np.flatnonzero(sections.section >= 0)
    by_section = inside[np.argsort(sections.section[inside], kind="stable")]
    ends = np.arange(len(sections.gate) + 1)
    starts = np.searchsorted(sections.section[by_section], ends)
    return by_section.astype(np.int64), starts.astype(np.int64)


def _placed(sections: Sections, is_large: BoolArray, weight_bytes: FloatArray) -> BoolArray:
    """Return which operators are placed: gates, and of each section the large, then the heavy."""
    is_placed = np.zeros(len(is_large), dtype=np.bool_)
    priority = np.where(is_large, np.inf, weight_bytes)
    candidates = np.flatnonzero((priority > 0) & (sections.section >= 1))
    candidates = candidates[np.argsort(-priority[candidates], kind="stable")]
    candidates = candidates[np.argsort(sections.section[candidates], kind="stable")]
    of_section = sections.section[candidates]
    rank = np.arange(len(candidates)) - np.searchsorted(of_section, of_section)
    is_placed[candidates[rank < _MOST_PLACED - 1]] = True
    is_placed[sections.gate] = True
    return is_placed


@inlined
def _reach(  # noqa: PLR0917 - compiled loops take arrays by position
    edges: Edges,
    source: int,
    ops: IntArray,
    is_placed: BoolArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    near_s: FloatArray,
    path_s: FloatArray,
    cross_s: FloatArray,
) -> None:
    """Fill what is between the end of `source` and the start of each of `ops`, in graph order.

    `near_s` of operators of one class; `path_s` and `cross_s`, of the path on which they add to
    most, the time of operators that are not placed and the cheapest transfer. -inf without a path.
    """
    for op in ops:
        near_s[op] = path_s[op] = -np.inf
        cross_s[op] = 0.0
        for i in range(edges.start[op], edges.start[op + 1]):
            maker, value = edges.maker[i], edges.value[i]
            if value < 0:
                continue
            if maker == source:
                near, path, cross = 0.0, 0.0, cheapest_s[value]
            elif not is_placed[maker] and near_s[maker] >= 0.0:
                near = near_s[maker] + time_s[maker]
                path = path_s[maker] + time_s[maker]
                cross = min(cross_s[maker], cheapest_s[value])
            else:
                continue
            near_s[op] = max(near_s[op], near)
            if path + cross > path_s[op] + cross_s[op]:
                path_s[op], cross_s[op] = path, cross


@inlined
def _between(  # noqa: PLR0917 - compiled loops take arrays by position
    edges: Edges,
    ops: IntArray,
    is_placed: BoolArray,
    placed: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
    near_s: FloatArray,
    path_s: FloatArray,
    cross_s: FloatArray,
) -> FloatArray:
    """Return the time between each two of `placed`, of one class and of two. Shape (2, P, P).

    `near_s`, all -inf before and after, `path_s` and `cross_s` are scratch arrays of length n.
    """
    size = placed.shape[0]
    between_s = np.full((2, size, size), -np.inf)
    for a in range(size - 1):
        _reach(edges, placed[a], ops, is_placed, time_s, cheapest_s, near_s, path_s, cross_s)
        for b in range(a + 1, size):
            same_class_s = near_s[placed[b]]
            between_s[0, a, b] = same_class_s
            between_s[1, a, b] = max(same_class_s, path_s[placed[b]] + cross_s[placed[b]])
    near_s[ops] = -np.inf
    return between_s


@inlined
def _seconds(
    choice: int, placed: IntArray, is_large: BoolArray, between_s: FloatArray, time_s: FloatArray
) -> float:
    """Return the time to the last of `placed`, roomy by the bits of `choice`, or infinity.

    From the end of the first, which is the gate before.
    """
    size = placed.shape[0]
    done_s = np.zeros(size)
    for b in range(size):
        roomy = (choice >> b) & 1
        if roomy == 0 and is_large[placed[b]]:
            return np.inf
        for a in range(b):
            differ = ((choice >> a) & 1) ^ roomy
            done_s[b] = max(done_s[b], done_s[a] + between_s[differ, a, b])
        if b > 0:
            done_s[b] += time_s[placed[b]]
    return float(done_s[size - 1])


@compiled
def _choices(  # noqa: PLR0917 - compiled loops take arrays by position
    edges: Edges,
    gate: IntArray,
    classes: _Classes,
    by_section: IntArray,
    starts: IntArray,
    time_s: FloatArray,
    cheapest_s: FloatArray,
) -> _Choices:
    """Return all ways to place each section on the two classes."""
    count, n = gate.shape[0], time_s.shape[0]
    near_s, path_s, cross_s = np.full(n, -np.inf), np.empty(n), np.empty(n)
    start = np.zeros(count + 1, dtype=np.int64)
    for k in range(1, count):
        placed_here = classes.is_placed[by_section[starts[k] : starts[k + 1]]].sum()
        start[k + 1] = start[k] + 2 ** (1 + placed_here)
    ends, seconds = np.empty(start[-1], dtype=np.int64), np.empty(start[-1])
    roomy_bytes = np.zeros(start[-1])
    for k in range(1, count):
        ops = by_section[starts[k] : starts[k + 1]]
        inside = ops[classes.is_placed[ops]]
        size = inside.shape[0] + 1
        placed = np.empty(size, dtype=np.int64)
        placed[0] = gate[k - 1]
        placed[1:] = inside
        between_s = _between(
            edges, ops, classes.is_placed, placed, time_s, cheapest_s, near_s, path_s, cross_s
        )
        for choice in range(2**size):
            row = start[k] + choice
            ends[row] = 2 * (choice & 1) + ((choice >> (size - 1)) & 1)
            seconds[row] = _seconds(choice, placed, classes.is_large, between_s, time_s)
            for b in range(1, size):
                roomy_bytes[row] += ((choice >> b) & 1) * classes.weight_bytes[placed[b]]
    return _Choices(start, ends, seconds, roomy_bytes)


@inlined
def _cheapest_row(choices: _Choices, price: float) -> tuple[float, float]:
    """Return the least seconds and price of a way for each section, and its bytes on roomy ones."""
    cost, used = np.zeros(2), np.zeros(2)
    for k in range(1, choices.start.shape[0] - 1):
        then, then_used = np.full(2, np.inf), np.zeros(2)
        for row in range(choices.start[k], choices.start[k + 1]):
            before, after = choices.ends[row] // 2, choices.ends[row] % 2
            total = cost[before] + choices.seconds[row] + price * choices.roomy_bytes[row]
            if total < then[after]:
                then[after] = total
                then_used[after] = used[before] + choices.roomy_bytes[row]
        cost[:], used[:] = then, then_used
    last = 0 if cost[0] <= cost[1] else 1
    return cost[last], used[last]


@compiled
def _priced_s(choices: _Choices, room_bytes: float) -> float:
    """Return the most that any price of a byte on roomy devices proves; all prove something."""
    best_s, low, high, price = 0.0, 0.0, np.inf, 0.0
    for _ in range(_PRICES):
        cost_s, used_bytes = _cheapest_row(choices, price)
        if cost_s == np.inf:
            break
        best_s = max(best_s, cost_s - price * room_bytes)
        if used_bytes > room_bytes:
            low = price
        elif price > 0.0:
            high = price
        else:
            break
        if low == 0.0 and high == np.inf:
            price = cost_s / used_bytes
        else:
            price = 2.0 * low if high == np.inf else (low + high) / 2.0
    return best_s
