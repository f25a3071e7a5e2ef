"""Calls that a device runs as one, and the CPU as several, by how a training step is run."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpart.phases import StepOptions

__all__ = ["fused"]

_PLACE_OF_PROBABILITY = 4
"""Of `scaled_dot_product_attention`: query, key, value, mask, probability."""


def fused(
    target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions
) -> Callable[[], Tensor] | None:
    """Return what runs a call in place of `target`, or None where that itself is to be run."""
    if target is torch.ops.aten.dropout.default and options.fused_dropout:
        return _dropout(*args, **kwargs)
    if target is torch.ops.aten.scaled_dot_product_attention.default and options.fused_attention:
        return _attention(args, kwargs)
    return None


def _dropout(x: Tensor, p: float, train: bool) -> Callable[[], Tensor] | None:
    """Return dropout whose mask has one byte for an element; the CPU's has a float."""
    if not train or not 0 < p < 1:
        return None

    def run() -> Tensor:
        result: Tensor = torch.ops.aten.native_dropout.default(x, p, train)[0]
        return result

    return run


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    """Return attention without dropout: memory and cost are those of the fused call that has it.

    Such a call draws the same numbers again in its backward, and keeps nothing for that but where
    the generator stood. The CPU has none.
    """
    place = _PLACE_OF_PROBABILITY
    given = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    if given == 0.0:
        return None
    if len(args) > place:
        args = (*args[:place], 0.0, *args[place + 1 :])
    kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}

    def run() -> Tensor:
        result: Tensor = torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
        return result

    return run
