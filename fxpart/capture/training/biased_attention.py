"""Attention with a learned bias, such as relative positions, as trained on accelerators.

Fused CPU kernels do not accept a mask that requires a gradient: torch then computes attention by
its definition and saves all probabilities for the backward. CUDA's memory-efficient kernels accept
such a mask, save one number per row, and recompute the probabilities, but only if rows of the mask
are contiguous. Otherwise CUDA too computes attention by its definition, in float32, as seen on an
H100 with T5 of transformers 5.17, whose bias is transposed.
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

    Only for cases covered by the fused kernels: a batch of heads of one size, and a floating-point
    mask that requires a gradient and has contiguous rows. The call must not use dropout.
    """
    named_args = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    mask, tensors = named_args.get("attn_mask"), [named_args[name] for name in _NAMES[:3]]
    if mask is None or not mask.requires_grad or named_args.get("is_causal", False):
        return None
    query, key, value = tensors
    is_regular = mask.stride(-1) == 1 and all(t.dim() == _DIMS for t in tensors)
    if not is_regular or named_args.get("enable_gqa", False):
        return None
    width = query.shape[-1]
    if not isinstance(width, int) or value.shape[-1] != width or mask.dtype != query.dtype:
        return None
    scale = named_args.get("scale")
    factor = width**-0.5 if scale is None else float(scale)

    def run() -> Tensor:
        bias = mask.reshape((1,) * (_DIMS - mask.dim()) + tuple(mask.shape))
        result: Tensor = _BiasedAttention.apply(query, key, value, bias, factor)  # type: ignore[no-untyped-call]
        return result

    return run


class _BiasedAttention(torch.autograd.Function):
    """Softmax of scaled scores plus a bias, times values; the backward recomputes the scores."""

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
        input_gradients = kernel(
            *(gradient, query, key, value, result, log_sums, 0.0, False),
            attn_mask=bias.detach(),
            scale=ctx.scale,
        )
        if not ctx.needs_input_grad[3]:
            return (*input_gradients, None, None)
        # In place, since the kernels hold only the scores and their gradients at that size.
        scores = torch.matmul(query, key.transpose(-2, -1)).mul_(ctx.scale).add_(bias)
        probabilities = scores.sub_(log_sums.unsqueeze(-1)).exp_()
        slopes = torch.matmul(gradient, value.transpose(-2, -1))
        slopes.sub_((gradient * result).sum(-1, keepdim=True)).mul_(probabilities)
        return (*input_gradients, slopes.sum_to_size(bias.shape), None)
