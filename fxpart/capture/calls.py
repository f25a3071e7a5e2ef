"""Which tensors are the same memory."""

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

__all__ = ["REGIONS", "body_of", "place_in_memory", "storage_key", "written_operands"]


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share while they are alive."""
    return int(tensor.untyped_storage()._cdata)


def place_in_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return what only tensors that are the same memory, read the same way, have in common.

    Parameters that are different objects may be; then a step trains them as one.
    """
    storage = tensor.untyped_storage()
    # A storage without memory, empty or on the meta device, has no address: its number tells.
    address = storage.data_ptr() or -storage_key(tensor)
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


# Which operands a call writes into: `written_operands`.


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


# Regions: calls of a graph of its own, under `torch.no_grad` or autocast.

REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
"""What calls a region."""


def body_of(node: fx.Node) -> fx.GraphModule:
    """Return the graph that `node`, which gets it as an attribute, hands to the call of a region.

    Raises:
        TypeError: for another attribute; captures refuse programs that have any.

    """
    owner = node.graph.owning_module
    found = owner.get_submodule(str(node.target)) if owner is not None else None
    if not isinstance(found, fx.GraphModule):
        raise TypeError(f"{node.name} is no region")
    return found
