"""The loss of a training step, the same wherever a step is captured or run."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["first_real", "loss_of"]


def first_real(results: Iterable[object]) -> Tensor | None:
    """Return the first real-valued tensor of a model's flat results; None without one."""
    tensors = (result for result in results if isinstance(result, Tensor))
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def loss_of(result: Tensor) -> Tensor:
    """Return `result` itself if it is one number, else its mean in float32."""
    return result if result.dim() == 0 else result.to(torch.float32).mean()
