"""Which names of weights, in one stage or over several, mean one parameter."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fxpart.pipeline.chain import Chain

__all__ = ["TiedName", "place_in_memory", "tied_parameters"]

TiedName = tuple[int, str]
"""A stage, and the name of a parameter in it."""


def tied_parameters(chain: "Chain") -> tuple[tuple[TiedName, ...], ...]:
    """Return the groups of names of one parameter, those that are alone left out."""
    names: dict[tuple[object, ...], list[TiedName]] = {}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            names.setdefault(place_in_memory(parameter), []).append((stage.index, name))
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def place_in_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return what only tensors that are the same memory, read the same way, have in common.

    Parameters that are different objects may be; then a step trains them as one.
    """
    storage = tensor.untyped_storage()
    # A storage without memory, empty or on the meta device, has no address: its number tells.
    address = storage.data_ptr() or -int(storage._cdata)
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
