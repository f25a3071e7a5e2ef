"""Which operands a call writes into: `written_operands`."""

from torch import fx
from torch.utils._pytree import tree_leaves

__all__ = ["written_operands"]


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call writes into, by its schema; of other nodes there are none."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    names = (argument.name for argument in schema.arguments)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [
        leaf
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(given.get(argument.name))
        if isinstance(leaf, fx.Node)
    ]
