"""Calls in a captured graph: tensors and storages, written operands, and bodies of regions."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

__all__ = [
    "REGIONS",
    "body_of",
    "keep_all_terms",
    "place_in_memory",
    "storage_key",
    "written_operands",
]

REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
"""Operators that call a region: a graph under `torch.no_grad` or autocast."""


def storage_key(tensor: Tensor) -> int:
    """Return a number identifying a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def place_in_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same elements in the same memory.

    Distinct parameter objects may share it; then a step trains them as one.
    """
    storage = tensor.untyped_storage()
    # A storage without memory (empty, or on the meta device) has no address.
    address = storage.data_ptr() or -storage_key(tensor)
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def keep_all_terms(operands: Iterable[Tensor], loss: Tensor) -> None:
    """Resize the storage of a reduced loss to that of all its terms, as torch leaves it.

    `mse_loss` and `smooth_l1_loss` allocate their result with the shape of the terms;
    `binary_cross_entropy` and `soft_margin_loss` compute the terms in it. All then resize it to a
    scalar, which frees nothing (``ATen/native/Loss.cpp`` and ``cuda/Loss.cu``: the same on every
    device). Their kernels for fake and meta tensors allocate only the scalar.

    Args:
        operands: the tensors that the loss is computed from, of concrete sizes.
        loss: the result, fake or meta.

    """
    shapes = [operand.shape for operand in operands]
    terms = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    storage = loss.untyped_storage()
    storage.resize_(max(int(storage.nbytes()), int(terms) * loss.element_size()))


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands written by a call according to its schema; empty for other nodes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    names = (argument.name for argument in schema.arguments)
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [
        leaf
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(arguments.get(argument.name))
        if isinstance(leaf, fx.Node)
    ]


def body_of(node: fx.Node) -> fx.GraphModule:
    """Return the region graph fetched by `node`, a ``get_attr``.

    Raises:
        TypeError: if the attribute is not a graph; captures refuse such programs.

    """
    owner = node.graph.owning_module
    body = owner.get_submodule(str(node.target)) if owner is not None else None
    if not isinstance(body, fx.GraphModule):
        raise TypeError(f"{node.name} is no region")
    return body
