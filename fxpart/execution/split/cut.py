"""The steps of every cut, one after the other."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import GraphModule, Node

from fxpart.errors import CycleError
from fxpart.execution.split.dependencies import dependencies_of
from fxpart.execution.split.emit import Cut, Style, emit
from fxpart.execution.split.regions import regions_of
from fxpart.execution.split.write_order import WriteEdges, write_edges

__all__ = ["Partitions", "call_order", "cut_module"]


# An order in which partitions can be called, or the circle in which they wait for each other.


def call_order(
    after: Sequence[Sequence[int]], writes: WriteEdges, names: Sequence[str], *, by_number: bool
) -> list[int]:
    """Return the partitions in an order in which each comes after all that it waits for.

    O(partitions + edges), times the logarithm of the partitions for `by_number`.

    Args:
        after: partitions that read from each. Length P.
        writes: pairs of which the first must run before the second, for a write in place.
        names: what partitions are called. Length P.
        by_number: of those that could come next, take the lowest number; else the one that became
            free last, as ``torch.fx.passes.split_module`` does.

    Raises:
        CycleError: when partitions wait for each other; the message names one circle of them.

    """
    following = [dict.fromkeys(row) for row in after]
    for before, behind in writes:
        following[before][behind] = None
    waits = [0] * len(names)
    for row in following:
        for part in row:
            waits[part] += 1
    ready = [part for part, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        part = heapq.heappop(ready) if by_number else ready.pop()
        order.append(part)
        for nxt in following[part]:
            waits[nxt] -= 1
            if waits[nxt] == 0 and by_number:
                heapq.heappush(ready, nxt)
            elif waits[nxt] == 0:
                ready.append(nxt)
    if len(order) < len(names):
        raise CycleError(_told(_circle(following, waits), after, writes, names))
    return order


def _circle(following: Sequence[dict[int, None]], waits: Sequence[int]) -> list[int]:
    """Return partitions of which each waits for the next; the first stands at the end again.

    Every partition that still waits waits for another such: following those leads into a circle.
    """
    source: dict[int, int] = {}
    for before, row in enumerate(following):
        for part in row:
            if waits[before] > 0 and waits[part] > 0:
                source.setdefault(part, before)
    here = next(part for part, left in enumerate(waits) if left > 0)
    path: dict[int, int] = {}
    while here not in path:
        path[here] = len(path)
        here = source[here]
    return [*list(path)[path[here] :], here]


def _told(
    circle: Sequence[int],
    after: Sequence[Sequence[int]],
    writes: WriteEdges,
    names: Sequence[str],
) -> str:
    """Return the message about one circle."""
    steps = []
    for later, earlier in pairwise(circle):
        if later in after[earlier]:
            steps.append(f"{names[later]} reads from {names[earlier]}")
        else:
            tensor = writes[earlier, later]
            steps.append(
                f"{names[later]} comes after {names[earlier]}, for {tensor} is written in place"
            )
    if len(steps) > 9:
        steps = [*steps[:8], "...", steps[-1]]
    return (
        f"partitions wait for each other: {'; '.join(steps)}; move the operators between them into"
        " one partition"
    )


@dataclass(frozen=True, slots=True)
class Partitions:
    """Partitions ``0..P-1`` and what they are called."""

    children: Sequence[str]
    """Name of the submodule of each. Length P."""
    ids: Sequence[object]
    """What the caller knows each by. Length P."""
    by_number: bool
    """Whether they are called in the order of their numbers, where that can be."""


def cut_module(
    module: GraphModule,
    part_of: Mapping[Node, int],
    partitions: Partitions,
    style: Style | None = None,
    *,
    qualname_map: dict[str, str] | None = None,
    top_class: type[GraphModule] = GraphModule,
) -> GraphModule:
    """Return `module` cut into partitions; `fxpart.split_module` says what holds.

    Args:
        module: what is cut; its graph stays as it is.
        part_of: partition of each operator; one that is left out runs before all partitions.
        partitions: their names and order.
        style: how nodes are named and what submodules hold.
        qualname_map: receives the new path of what submodules hold, with its path in `module`.
        top_class: class of the result.

    """
    style = style or Style()
    ops = [node for node in module.graph.nodes if node in part_of]
    dependencies = dependencies_of(
        module, part_of, len(partitions.ids), with_symbols=not style.own_attributes
    )
    regions = regions_of(ops, part_of, partitions.ids)
    writes = write_edges(module, ops, part_of)
    called = [f"partition {one}" for one in partitions.ids]
    # A graph that leaves a grad mode behind does so after everything else.
    by_number = partitions.by_number or regions.any
    order = call_order(dependencies.after, writes, called, by_number=by_number)
    cut = Cut(module, partitions.children, dependencies, regions, order, style)
    return emit(cut, qualname_map, top_class)
