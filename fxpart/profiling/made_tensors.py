"""Tensors that stand for what a model was captured without: weights, inputs, skipped results.

Their values are random, of a size that keeps results neither huge nor vanishing: a number close to
zero (a denormal one) would take a processor many times as long.
"""

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["made_value", "made_weight"]

_BLOCK = 2**20
_MOST_INTEGER = 2**15


def made_value(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like an input or a result: normally distributed, or small whole numbers."""
    return _made(like, device, 1.0, 0.0)


def made_weight(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like a weight or a buffer.

    A matrix or filter keeps the size of what it is applied to; a vector is near 1, as the weight
    of a norm and its running variance are; whole numbers count up, as positions do; a mask is true.
    """
    if like.dtype == torch.bool:
        return _strided(like, torch.ones((), dtype=torch.bool, device=device), device)
    if not (like.is_floating_point() or like.is_complex()):
        last = int(like.shape[-1]) if like.dim() else 1
        count = torch.arange(max(1, last), device=device).remainder(_most(like.dtype))
        return _strided(like, count.to(like.dtype), device)
    if like.dim() < 2:
        return _made(like, device, 0.1, 1.0)
    fan_in = max(1, int(like.numel()) // max(1, int(like.shape[0])))
    return _made(like, device, 1.0 / math.sqrt(fan_in), 0.0)


def _most(dtype: torch.dtype) -> int:
    return min(_MOST_INTEGER, torch.iinfo(dtype).max)


def _made(like: Tensor, device: torch.device, scale: float, shift: float) -> Tensor:
    """Return a tensor of that shape, strides and dtype; whole numbers stay small."""
    # Of a small tensor, no more is made than it needs: the rest would empty the caches.
    elements = _elements(like)
    normal, whole = _normal()[:elements], _whole()[:elements]
    if like.dtype == torch.bool:
        block = normal > 0
    elif like.is_floating_point():
        block = normal if (scale, shift) == (1.0, 0.0) else normal * scale + shift
    elif like.is_complex():
        block = torch.complex(normal * scale, normal * scale)
    else:
        block = whole.remainder(_most(like.dtype))
    return _strided(like, block.to(device, like.dtype), device)


def _elements(like: Tensor) -> int:
    """Return how many elements the storage of a tensor laid out as `like` has at least."""
    if like.numel() == 0:
        return 0
    dims = zip(like.shape, like.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in dims)


def _strided(like: Tensor, block: Tensor, device: torch.device) -> Tensor:
    """Return `block`, repeated as often as needed, in the layout of `like`."""
    elements = _elements(like)
    block = block.reshape(-1)[:elements]
    # Random numbers cost more than copying them does, and times do not depend on repeats.
    flat = torch.empty(elements, dtype=like.dtype, device=device)
    whole, rest = divmod(elements, max(1, block.numel()))
    flat[: elements - rest].view(whole, -1 if whole else 0).copy_(block)
    flat[elements - rest :].copy_(block[:rest])
    return flat.as_strided(like.shape, like.stride())


@cache
def _normal() -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


@cache
def _whole() -> Tensor:
    return torch.randint(_MOST_INTEGER, (_BLOCK,), generator=torch.Generator().manual_seed(1))
