"""The model that odd configurations are planned for."""

import torch
from torch import nn

__all__ = ["build"]


def build(
    batch_size: int, dtype: torch.dtype, width: int = 8, layers: int = 4
) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a few layers and their input."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(dtype), (torch.zeros(batch_size, width, dtype=dtype),)
