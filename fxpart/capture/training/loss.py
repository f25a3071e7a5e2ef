"""The loss of a training step, the same wherever a step is captured or run."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fxpart.errors import SpecError

__all__ = ["first_real", "loss_of", "training_loss"]


def first_real(results: Iterable[object]) -> Tensor | None:
    """Return the first floating-point tensor of a model's flat results, if any."""
    tensors = (result for result in results if isinstance(result, Tensor))
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def loss_of(result: Tensor) -> Tensor:
    """Return `result` itself if it is a single number, else its mean in float32."""
    return result if result.dim() == 0 else result.to(torch.float32).mean()


def training_loss(results: Sequence[Tensor]) -> Tensor:
    """Return the `loss_of` the first floating-point result.

    Args:
        results: flat results of the model.

    Raises:
        SpecError: if there is none, or it depends on no weight.

    """
    result = first_real(results)
    if result is None:
        raise SpecError(
            "the model returns no real-valued tensor to take a loss of; return the loss first, or"
            " run without training (phase=inference)"
        )
    if torch.is_grad_enabled() and not result.requires_grad:
        raise SpecError(
            "the loss, which is the model's first real-valued result, depends on no weight; return"
            " another one first, or run without training (phase=inference)"
        )
    return loss_of(result)
