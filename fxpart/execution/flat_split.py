"""A split module laid out flat: one graph of all operators, by partition, without the borders."""

from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

__all__ = ["FlatSplit", "flat_split", "partition_number"]

_PREFIX = "submod_"


@dataclass(frozen=True, eq=False, slots=True)
class FlatSplit:
    """What a split module computes, operator by operator, partition after partition."""

    split: fx.GraphModule
    """The module; its children ``submod_<i>`` are the partitions."""
    graph: fx.Graph
    """The operators of all partitions in the order in which they run. Attributes and modules that
    it names are found from `split`."""
    partition_of: dict[fx.Node, int]
    """Partition of each node of `graph`; inputs, the result and what runs outside have none."""


def partition_number(node: fx.Node) -> int | None:
    """Return which partition a node of the top graph of a split module calls; None if none."""
    name = str(node.target)
    if node.op != "call_module" or not name.startswith(_PREFIX):
        return None
    return int(name.removeprefix(_PREFIX))


def flat_split(split: fx.GraphModule) -> FlatSplit:
    """Return the flat layout of a module that `fxpart.split.split_by_assignment` made."""
    flat = FlatSplit(split, fx.Graph(), {})
    # A partition with several results stands for a tuple of nodes.
    values: dict[fx.Node, Any] = {}
    for node in split.graph.nodes:
        number = partition_number(node)
        if number is not None:
            given = fx.node.map_aggregate(node.args, lambda x: _found(x, values))
            values[node] = _inlined(flat, str(node.target), number, given)
        elif node.target is getitem and isinstance(values[node.args[0]], tuple | list):
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "output":
            flat.graph.output(fx.node.map_aggregate(node.args[0], lambda x: _found(x, values)))
        else:
            values[node] = flat.graph.node_copy(node, lambda x: values[x])
    return flat


def _found(leaf: object, values: dict[fx.Node, Any]) -> Any:  # noqa: ANN401
    return values[leaf] if isinstance(leaf, fx.Node) else leaf


def _inlined(flat: FlatSplit, name: str, number: int, given: Any) -> Any:  # noqa: ANN401
    """Copy the nodes of child `name` into the flat graph; return what stands for its results."""
    child = flat.split.get_submodule(name)
    if not isinstance(child, fx.GraphModule):
        raise TypeError(f"{name} is a {type(child).__name__}; partitions are graph modules")
    values: dict[fx.Node, Any] = {}
    arguments = iter(given)
    for node in child.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "output":
            return fx.node.map_aggregate(node.args[0], lambda x: _found(x, values))
        else:
            copied = flat.graph.node_copy(node, lambda x: values[x])
            if node.op in ("get_attr", "call_module"):
                copied.target = f"{name}.{node.target}"
            flat.partition_of[copied] = number
            values[node] = copied
    raise AssertionError("a graph ends with its output")
