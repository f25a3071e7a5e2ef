"""`cut_module`: the steps of every cut, and the order in which partitions are called."""

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


def call_order(
    after: Sequence[Sequence[int]], writes: WriteEdges, names: Sequence[str], *, by_number: bool
) -> list[int]:
    """Return a topological order of the partitions.

    O(partitions + edges), times the logarithm of the partitions for `by_number`.

    Args:
        after: partitions that read from each partition. Length P.
        writes: pairs whose first must run before the second because of an in-place write.
        names: names of the partitions. Length P.
        by_number: among ready partitions, take the lowest number; otherwise the one that became
            ready last, as ``torch.fx.passes.split_module`` does.

    Raises:
        CycleError: if partitions wait for each other; the message names one cycle.

    """
    successors = [dict.fromkeys(row) for row in after]
    for before, behind in writes:
        successors[before][behind] = None
    waits = [0] * len(names)
    for row in successors:
        for part in row:
            waits[part] += 1
    ready = [part for part, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        part = heapq.heappop(ready) if by_number else ready.pop()
        order.append(part)
        for successor in successors[part]:
            waits[successor] -= 1
            if waits[successor] == 0 and by_number:
                heapq.heappush(ready, successor)
            elif waits[successor] == 0:
                ready.append(successor)
    if len(order) < len(names):
        raise CycleError(_circle_message(_circle(successors, waits), after, writes, names))
    return order


def _circle(successors: Sequence[dict[int, None]], waits: Sequence[int]) -> list[int]:
    """Return a cycle of partitions, each waiting for the next; the first is repeated at the end.

    Every waiting partition waits for another waiting one, so following them leads into a cycle.
    """
    # Imported only for the message, since it takes half a second.
    import networkx

    waiting_for = networkx.DiGraph(
        (part, before)
        for before, row in enumerate(successors)
        for part in row
        if waits[before] > 0 and waits[part] > 0
    )
    first = next(part for part, count in enumerate(waits) if count > 0)
    edges = networkx.find_cycle(waiting_for, first)
    return [edges[0][0], *(end for _, end in edges)]


def _circle_message(
    circle: Sequence[int],
    after: Sequence[Sequence[int]],
    writes: WriteEdges,
    names: Sequence[str],
) -> str:
    """Return the message naming one cycle of partitions."""
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
    """Partitions ``0..P-1`` and their names."""

    children: Sequence[str]
    """Name of the submodule of each. Length P."""
    ids: Sequence[object]
    """The caller's id of each. Length P."""
    by_number: bool
    """Whether to call them in the order of their numbers where possible."""


def cut_module(
    module: GraphModule,
    part_of: Mapping[Node, int],
    partitions: Partitions,
    style: Style | None = None,
    *,
    qualname_map: dict[str, str] | None = None,
    top_class: type[GraphModule] = GraphModule,
) -> GraphModule:
    """Return `module` cut into partitions; see `fxpart.split_module` for the guarantees.

    Args:
        module: the module to cut; its graph is not changed.
        part_of: partition of each operator; operators without one run before all partitions.
        partitions: their names and order.
        style: naming of nodes, and contents of submodules.
        qualname_map: filled with the new path of each module and attribute of a submodule, mapped
            to its path in `module`.
        top_class: class of the result.

    """
    style = style or Style()
    ops = [node for node in module.graph.nodes if node in part_of]
    dependencies = dependencies_of(
        module, part_of, len(partitions.ids), with_symbols=not style.own_attributes
    )
    regions = regions_of(ops, part_of, partitions.ids)
    writes = write_edges(module, ops, part_of)
    names = [f"partition {part_id}" for part_id in partitions.ids]
    # In a graph with grad modes, the partition that sets the last one must run last.
    by_number = partitions.by_number or regions.any
    order = call_order(dependencies.after, writes, names, by_number=by_number)
    cut = Cut(module, partitions.children, dependencies, regions, order, style)
    return emit(cut, qualname_map, top_class)
