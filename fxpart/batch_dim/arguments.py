"""The arguments of a call node by the names of its operator's schema."""

from typing import Any

import torch
from torch import fx

__all__ = ["base_name", "named_arguments", "tensors_of"]


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
