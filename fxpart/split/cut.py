"""The steps of every cut, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxpart.split.dependencies import dependencies_of
from fxpart.split.emit import Cut, Style, emit
from fxpart.split.order import call_order
from fxpart.split.regions import regions_of
from fxpart.split.write_order import write_edges

__all__ = ["Partitions", "cut_module"]


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
    """Return `module` cut into partitions; `fxpart.split.split_module` says what holds.

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
