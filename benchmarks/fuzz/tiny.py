"""The model of the odd configurations."""

import torch
from torch import nn

__all__ = ["build"]


def build(
    batch_size: int, dtype: torch.dtype, width: int = 8, layers: int = 4
) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a model of a few layers, and its input."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(dtype), (torch.zeros(batch_size, width, dtype=dtype),)
