"""Which tensors are the same memory."""

from torch import Tensor

__all__ = ["place_in_memory", "storage_key"]


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
