"""`Call`: one call node as a rule sees it, with the layouts of what it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxpart.capture.batch_dim.extent import Extent, extents
from fxpart.capture.batch_dim.layout import Batch, Layout

__all__ = ["Call", "base_name", "call_of", "named_arguments", "tensors_of"]


# The arguments of a call node by the names of its operator's schema.


def base_name(node: fx.Node) -> str:
    """Return what a node calls without library and overload, such as ``add`` for ``aten.add_``.

    An operator that writes into its argument has the name of the one that does not; a Python
    function has its own.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.rpartition("::")[2]
        in_place = name.endswith("_") and not name.endswith("__")
        return name[:-1] if in_place else name
    return str(getattr(node.target, "__name__", node.target))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return each argument that the schema names, defaults where the call gives none.

    Without a schema the names are the positions, as text.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(i): value for i, value in enumerate(node.args)}, **node.kwargs}
    found: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            found[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def tensors_of(value: object) -> list[torch.Tensor | None]:
    """Return the items of what a node makes, one for a tensor; None for what is no tensor."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    return [item if isinstance(item, torch.Tensor) else None for item in items]


Sizes = tuple[Extent, ...]


@dataclass(eq=False, slots=True)
class Call:
    """A call node; rules read it, and note what else must be known of it."""

    node: fx.Node
    name: str
    """See `fxpart.capture.batch_dim.call.base_name`."""
    arguments: Mapping[str, Any]
    results: list[Sizes | None]
    """Sizes of each result; None for one that is no tensor."""
    batch: Batch
    state: Mapping[fx.Node, Sequence[Layout]]
    reduced: list[fx.Node] = field(default_factory=list)
    """Partial operands that must be all-reduced before the call, each once."""
    apart: list[fx.Node] = field(default_factory=list)
    """Operands that may differ from process to process without the results doing so."""
    by_size: bool = False
    """Whether the answer rests on an equality of sizes, no rule being known."""

    @property
    def operands(self) -> list[fx.Node]:
        """All nodes that the call reads, in order."""
        return [n for n in self.node.all_input_nodes if n in self.state]

    def first(self) -> fx.Node:
        """Return the first operand."""
        return self.operands[0]

    def layout(self, value: object) -> Layout:
        """Return the layout of an argument; numbers are replicated, and 0 is zero."""
        if isinstance(value, fx.Node):
            return self.state[value][0] if value in self.state else Layout()
        return Layout(is_zero=isinstance(value, int | float) and value == 0)

    def sizes(self, value: object) -> Sizes:
        """Return the sizes of an argument, none of a number."""
        made = value.meta.get("val") if isinstance(value, fx.Node) else None
        return extents(made.shape) if isinstance(made, torch.Tensor) else ()

    def whole(self, value: object) -> Layout:
        """Return the layout of an argument that is read as a whole: all-reduced if partial."""
        found = self.layout(value)
        if not found.is_partial or not isinstance(value, fx.Node):
            return found
        if value not in self.reduced:
            self.reduced.append(value)
        return Layout(differs=found.differs)

    def aligned(self, value: object, rank: int, layout: Layout | None = None) -> Layout:
        """Return a layout as it is after broadcasting the argument to `rank` dimensions."""
        found = self.layout(value) if layout is None else layout
        if not found.is_split:
            return found
        return replace(found, dim=found.dim + rank - len(self.sizes(value)))

    def leaves(self) -> list[Any]:
        """Return the arguments, lists taken apart."""
        return list(tree_leaves(dict(self.arguments)))

    def rank(self, result: int = 0) -> int:
        """Return how many dimensions a result has."""
        return len(self.results[result] or ())


def call_of(node: fx.Node, batch: Batch, state: Mapping[fx.Node, Sequence[Layout]]) -> Call:
    """Return the call node as rules see it."""
    made = [
        None if tensor is None else extents(tensor.shape)
        for tensor in tensors_of(node.meta.get("val"))
    ]
    return Call(node, base_name(node), named_arguments(node), made, batch, state)
