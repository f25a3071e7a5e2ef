"""`Call`: one call node for a rule, with the layouts of its operands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxpart.capture.batch_dim.extent import Extent, extents
from fxpart.capture.batch_dim.layout import Batch, Layout

__all__ = ["Call", "base_name", "call_of", "named_arguments", "tensors_of"]


Sizes = tuple[Extent, ...]


def base_name(node: fx.Node) -> str:
    """Return the name of the called operator without namespace and overload.

    An in-place operator has the name of its functional variant: ``add`` for ``aten.add_``. A Python
    function has its own name.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.rpartition("::")[2]
        in_place = name.endswith("_") and not name.endswith("__")
        return name[:-1] if in_place else name
    return str(getattr(node.target, "__name__", node.target))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments by schema name, with defaults for omitted ones.

    Without a schema, positional arguments are named by position.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(i): value for i, value in enumerate(node.args)}, **node.kwargs}
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            arguments[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = (
                argument.default_value if argument.has_default_value() else None
            )
    return arguments


def tensors_of(value: object) -> list[torch.Tensor | None]:
    """Return the tensors in a node's value, a single one for a tensor; None for other items."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    return [item if isinstance(item, torch.Tensor) else None for item in items]


@dataclass(eq=False, slots=True)
class Call:
    """A call node, read by rules, which set `reduced`, `apart` and `by_size`."""

    node: fx.Node
    name: str
    """See `base_name`."""
    arguments: Mapping[str, Any]
    results: list[Sizes | None]
    """Sizes of each result; None for a non-tensor result."""
    batch: Batch
    state: Mapping[fx.Node, Sequence[Layout]]
    reduced: list[fx.Node] = field(default_factory=list)
    """Partial operands that must be all-reduced before the call, each once."""
    apart: list[fx.Node] = field(default_factory=list)
    """Operands that may differ between processes without affecting the results."""
    by_size: bool = False
    """Whether the answer relies on equal sizes, for lack of a rule."""

    @property
    def operands(self) -> list[fx.Node]:
        """All nodes read by the call, in order."""
        return [n for n in self.node.all_input_nodes if n in self.state]

    def first(self) -> fx.Node:
        """Return the first operand."""
        return self.operands[0]

    def layout(self, value: object) -> Layout:
        """Return the layout of an argument; numbers are replicated, and 0 is marked as zero."""
        if isinstance(value, fx.Node):
            return self.state[value][0] if value in self.state else Layout()
        return Layout(is_zero=isinstance(value, int | float) and value == 0)

    def sizes(self, value: object) -> Sizes:
        """Return the sizes of an argument, empty for a number."""
        tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
        return extents(tensor.shape) if isinstance(tensor, torch.Tensor) else ()

    def whole(self, value: object) -> Layout:
        """Return the layout of an argument, after an all-reduce if it is partial."""
        layout = self.layout(value)
        if not layout.is_partial or not isinstance(value, fx.Node):
            return layout
        if value not in self.reduced:
            self.reduced.append(value)
        return Layout(differs=layout.differs)

    def aligned(self, value: object, rank: int, layout: Layout | None = None) -> Layout:
        """Return a layout after broadcasting the argument to `rank` dimensions."""
        layout = self.layout(value) if layout is None else layout
        if not layout.is_split:
            return layout
        return replace(layout, dim=layout.dim + rank - len(self.sizes(value)))

    def leaves(self) -> list[Any]:
        """Return the arguments, with lists flattened."""
        return list(tree_leaves(dict(self.arguments)))

    def rank(self) -> int:
        """Return the number of dimensions of the first result."""
        return len(self.results[0] or ())


def call_of(node: fx.Node, batch: Batch, state: Mapping[fx.Node, Sequence[Layout]]) -> Call:
    """Return the `Call` of a node."""
    results = [
        None if tensor is None else extents(tensor.shape)
        for tensor in tensors_of(node.meta.get("val"))
    ]
    return Call(node, base_name(node), named_arguments(node), results, batch, state)
