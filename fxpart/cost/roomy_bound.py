"""A lower bound of latency: devices with room for large results have little room for weights.

While an operator runs, its device holds its operands and results, besides all weights placed there.
Consider the operators that need `large_bytes` or more for operands and results: a device that runs
one of them, called roomy here, has at most its memory less `large_bytes` for weights. If the
weights leave room for only a few such devices, other operators with weights must be elsewhere, and
values that pass between them and the large operators are sent. Along the longest path, each section
between two gates (`fxpart.cost.memory_bound`) is therefore placed in every way on two classes of
devices, roomy and others, with transfers only between the classes. The room for weights on roomy
devices is divided among the sections by a price (Lagrangian relaxation; Geoffrion, Mathematical
Programming Study 2, 1974, doi:10.1007/BFb0120690).
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
"""Upper bound of the placed operators of a section; the others are free to be wherever is best."""
_MOST_SIZES = 6
"""Upper bound of the values tried for `large_bytes`."""
_PRICES = 32
"""Prices tried for each value of `large_bytes`."""


class _Classes(NamedTuple):
    """The operators to place on the two classes."""

    is_large: BoolArray
    """Whether each operator must run on a roomy device. Length n."""
    weight_bytes: FloatArray
    """Bytes of the weights that each operator is the first to use. Length n."""
    is_placed: BoolArray
    """Whether each operator is placed: all gates, and some large or heavy ones. Length n."""


class _Choices(NamedTuple):
    """The ways to place each section; those of gate k are ``start[k]`` to ``start[k + 1]`` - 1."""

    start: IntArray
    ends: IntArray
    """2 x class of the previous gate + class of the gate, where 1 is roomy."""
    seconds: FloatArray
    """Lower bound of the time from gate to gate."""
    roomy_bytes: FloatArray
    """Bytes of weights on roomy devices."""


def roomy_bound_s(
    problem: Problem, edges: Edges, sections: Sections, time_s: FloatArray, cheapest_s: FloatArray
) -> float:
    """Return a lower bound of the latency of feasible placements in s; 0 if memory is plentiful.

    Args:
        problem: a graph on several devices.
        edges: predecessors of each operator.
        sections: sections along the longest path.
        time_s: time of each operator on its fastest device.
        cheapest_s: time to transfer each value over the fastest link.

    """
    graph, memory = problem.graph, np.sort(problem.topology.memory_bytes)[::-1]
    needs, weight_bytes = transient_bytes(problem), _first_used_bytes(problem)
    spare_bytes = int(memory.sum()) - int(weight_bytes.sum())
    largest_bytes = int(needs.max(initial=0))
    # Sizes for which not every device has room besides the weights.
    not_all = needs * (len(memory) - 1) > spare_bytes - largest_bytes
    sizes = np.unique(needs[not_all & (needs > 0)])[::-1]
    best_s = 0.0
    for large_bytes in sizes[:: max(1, -(-len(sizes) // _MOST_SIZES))].tolist():
        # One of the roomy devices runs the operator that needs the most.
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
    """Return the operators by section, each in graph order, and the starts of the sections."""
    inside = np.flatnonzero(sections.section >= 0)
    by_section = inside[np.argsort(sections.section[inside], kind="stable")]
    ends = np.arange(len(sections.gate) + 1)
    starts = np.searchsorted(sections.section[by_section], ends)
    return by_section.astype(np.int64), starts.astype(np.int64)


def _placed(sections: Sections, is_large: BoolArray, weight_bytes: FloatArray) -> BoolArray:
    """Return whether each operator is placed: gates, and in each section large, then heavy ones."""
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
    """Fill the times between the end of `source` and the start of each of `ops`, in graph order.

    `near_s` is for endpoints of one class. For endpoints of two classes, `path_s` is the time of
    operators that are not placed and `cross_s` the cheapest transfer, on the path with the largest
    sum of both. -inf without a path.
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
    """Return the time between each pair of `placed`, in one class and in two. Shape (2, P, P).

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
    """Return the time from the end of the first to the last of `placed`, or infinity.

    The first is the previous gate. The bits of `choice` tell which are on roomy devices.
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
    """Return the least sum of time and price over one way per section, and its roomy bytes."""
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
    """Return the best bound over prices per byte on roomy devices; each price gives a bound."""
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
