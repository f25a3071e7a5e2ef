"""Attention with a learned bias, such as relative positions, as accelerators train it.

The fused kernels of a CPU take no mask that requires a gradient: torch then computes attention by
its definition, and keeps all probabilities for the backward. The memory-efficient kernels of CUDA
take such a mask, keep one number a row, and compute the probabilities again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["biased_attention"]

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Positional arguments of `scaled_dot_product_attention`; `scale` and `enable_gqa` are named."""
_DIMS = 4


def biased_attention(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], Tensor] | None:
    """Return a function to run in place of `scaled_dot_product_attention`; None to run the call.

    Only for what the fused kernels compute: a batch of heads of one size each, and a floating-point
    mask that requires a gradient. The call must be without dropout.
    """
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    mask, tensors = given.get("attn_mask"), [given[name] for name in _NAMES[:3]]
    if mask is None or not mask.requires_grad or given.get("is_causal", False):
        return None
    query, key, value = tensors
    if given.get("enable_gqa", False) or any(t.dim() != _DIMS for t in tensors):
        return None
    width = query.shape[-1]
    if not isinstance(width, int) or value.shape[-1] != width or mask.dtype != query.dtype:
        return None
    scale = given.get("scale")
    factor = width**-0.5 if scale is None else float(scale)

    def run() -> Tensor:
        bias = mask.reshape((1,) * (_DIMS - mask.dim()) + tuple(mask.shape))
        result: Tensor = _BiasedAttention.apply(query, key, value, bias, factor)  # type: ignore[no-untyped-call]
        return result

    return run


class _BiasedAttention(torch.autograd.Function):
    """Softmax of scaled scores plus a bias, times values; the backward computes scores again."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as torch calls it
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        scale: float,
    ) -> Tensor:
        result: Tensor
        result, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, False, attn_mask=bias.detach(), scale=scale
        )
        ctx.save_for_backward(query, key, value, bias, result, log_sums)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: Tensor,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, bias, result, log_sums = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        of_inputs = kernel(
            *(gradient, query, key, value, result, log_sums, 0.0, False),
            attn_mask=bias.detach(),
            scale=ctx.scale,
        )
        if not ctx.needs_input_grad[3]:
            return (*of_inputs, None, None)
        # In place: the kernels hold the scores and their slopes, and no more of that size.
        scores = torch.matmul(query, key.transpose(-2, -1)).mul_(ctx.scale).add_(bias)
        probabilities = scores.sub_(log_sums.unsqueeze(-1)).exp_()
        slopes = torch.matmul(gradient, value.transpose(-2, -1))
        slopes.sub_((gradient * result).sum(-1, keepdim=True)).mul_(probabilities)
        return (*of_inputs, slopes.sum_to_size(bias.shape), None)
