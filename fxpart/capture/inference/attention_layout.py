"""Attention in a trace: by its definition where a model asks for that, else laid out as fused.

Fused attention returns its result laid out as its query, in torch's kernels for the CPU as in flash
attention and cuDNN for CUDA. Models view queries as (batch, tokens, heads, width) and transpose
them, so transposed back the result is contiguous, and `contiguous` or `reshape` copies nothing. On
meta, torch computes attention by its definition, whose result is laid out by heads: `contiguous`
would copy where no device does, and copy nothing where devices do.

Calls inside a torch function written in Python, such as `nn.MultiheadAttention`'s, and in models
that take gradients in their forward, keep the layout of the definition.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

__all__ = ["lay_out_as_fused", "unfused_if_asked"]

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_CPU = torch.device("cpu")


def lay_out_as_fused(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: object,
) -> bool:
    """Change the strides of `result` to those of a fused kernel, and return whether that was done.

    Args:
        function: the torch function that was called in a trace.
        args: its positional arguments.
        kwargs: its named arguments.
        result: what it returned. Nothing else may refer to its storage.

    """
    if function is not functional.scaled_dot_product_attention:
        return False
    if not isinstance(result, FakeTensor) or result.device.type != "meta":
        return False
    with disable_proxy_modes_tracing():
        with result.fake_mode, torch.no_grad():
            args, kwargs = tree_map(_on_cpu, (args, dict(kwargs)))
            strides = _ATTENTION(*args, **kwargs).stride()
        if strides == result.stride():
            return False
        # Of the tensor at hand alone: autograd and the trace have seen its call.
        with (
            no_dispatch(),
            torch._C._AutoDispatchBelowAutograd(),
            _unsafe_preserve_version_counter(result),
        ):
            result.as_strided_(result.shape, strides)
    return True


def unfused_if_asked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, or attention as products and a softmax if fused kernels are disabled.

    A model does so by ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` around the call.
    """
    if function is not functional.scaled_dot_product_attention:
        return function
    cuda = torch.backends.cuda
    fused = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    allows_fused = any(is_enabled() for is_enabled in fused)  # type: ignore[no-untyped-call]
    return function if allows_fused else _by_definition


def _by_definition(  # noqa: PLR0917 - called as torch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # As `convert_boolean_attn_mask` in ATen.
        never = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, never)
    operands = (query, key, value, attn_mask, dropout_p, is_causal)
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*operands, **kwargs)[0]
    return result


def _on_cpu(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_CPU)
