"""Tensors in the value of a node, and the numbers and sizes of their storages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fxpart.errors import CaptureError

__all__ = ["SizeOf", "hinted_bytes", "storage_number", "tensors_with_memory"]

SizeOf = Callable[[int | torch.SymInt], int]
"""Returns the number for a possibly symbolic size in bytes."""

_PLAIN = (FakeTensor, Tensor, torch.nn.Parameter)
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def hinted_bytes(size: int | torch.SymInt) -> int:
    """Return the size in bytes; for a symbolic size, its value at the capture's example inputs.

    Raises:
        CaptureError: if the size is data-dependent.

    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise CaptureError(
            f"a storage of {size} bytes has a size that depends on values of tensors; pass "
            "size_of, which returns a number for it"
        )
    return int(hint)


def tensors_with_memory(value: object) -> tuple[Tensor, ...]:
    """Return the tensors with a storage in a nested value, in order.

    A sparse tensor, or a subclass that wraps others, is replaced by its parts.
    """
    if type(value) is FakeTensor and value.layout is torch.strided:
        return (value,)
    if value is None:
        return ()
    tensors: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.extend(_parts(leaf))
    return tuple(tensors)


def storage_number(tensor: Tensor) -> int:
    """Return a number identifying a tensor's storage while one of the storage's tensors is alive.

    Raises:
        CaptureError: if the tensor's layout has no storage.

    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError as error:  # raised by torch for a sparse tensor
        raise CaptureError(
            f"a tensor of layout {tensor.layout} has no storage to count; capture the model with"
            " dense tensors"
        ) from error


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner: list[Any] = [getattr(tensor, name) for name in names]
        return tuple(part for component in inner for part in _parts(component))
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        return getattr(tensor, first)(), getattr(tensor, second)(), tensor.values()
    return (tensor,)
