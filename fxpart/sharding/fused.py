"""Fused kernels of Megatron-LM as operators, captured by shape and computed on a CPU.

Each saves the same tensors for its backward as NVIDIA's: Transformer Engine's RMSNorm its input and
one number per row, the gated activation its two inputs, the causal softmax of attention its result
in the dtype of the scores, the loss over a split vocabulary its probabilities in float32
(NVIDIA/Megatron-LM, megatron/core/fusions).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["causal_softmax", "gated", "rms_norm", "vocabulary_losses"]

# Names with a leading underscore are those of torch's operators, whose rules apply to them.
_NORM, _NORM_BACK = "fxpart::_fused_rms_norm", "fxpart::_fused_rms_norm_backward"
_GATED, _GATE_BACK = "fxpart::swiglu", "fxpart::swiglu_gate_backward"
_UP_BACK = "fxpart::swiglu_up_backward"
_SOFTMAX, _SOFTMAX_BACK = "fxpart::causal_softmax", "fxpart::causal_softmax_backward"
_LOSS, _LOSS_BACK = "fxpart::vocab_losses", "fxpart::vocab_losses_backward"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` divided by its root mean square along the last dimension, times `weight`."""
    result: Tensor = torch.ops.fxpart._fused_rms_norm(x, weight, eps)[0]
    return result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``."""
    result: Tensor = torch.ops.fxpart.swiglu(gate, up)
    return result


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Return the softmax of `scores` times `scale` under a causal mask.

    The mask excludes later positions, above the diagonal of the last two dimensions.
    """
    result: Tensor = torch.ops.fxpart.causal_softmax(scores, scale)
    return result


def vocabulary_losses(logits: Tensor, targets: Tensor, group: int, rank: int) -> Tensor:
    """Return the cross entropy of each position in float32; 0 for negative targets.

    Args:
        logits: logits of this device's part of the vocabulary. Shape (batch, positions, vocabulary
            / N).
        targets: indices into the whole vocabulary. Shape (batch, positions).
        group: N, the number of devices that share the vocabulary.
        rank: rank of this device.

    """
    result: Tensor = torch.ops.fxpart.vocab_losses(logits, targets, group, rank)[0]
    return result


torch.library.define(_NORM, "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
torch.library.define(
    _NORM_BACK, "(Tensor gradient, Tensor x, Tensor rstd, Tensor weight) -> (Tensor, Tensor)"
)
_POINTWISE = (torch.Tag.pointwise,)
torch.library.define(_GATED, "(Tensor gate, Tensor up) -> Tensor", tags=_POINTWISE)
torch.library.define(_GATE_BACK, "(Tensor gradient, Tensor gate, Tensor up) -> Tensor")
torch.library.define(_UP_BACK, "(Tensor gradient, Tensor gate) -> Tensor")
torch.library.define(_SOFTMAX, "(Tensor scores, float scale) -> Tensor")
torch.library.define(_SOFTMAX_BACK, "(Tensor gradient, Tensor softmax, float scale) -> Tensor")
torch.library.define(
    _LOSS, "(Tensor logits, Tensor targets, int group, int rank) -> (Tensor, Tensor)"
)
torch.library.define(
    _LOSS_BACK,
    "(Tensor softmax, Tensor gradient, Tensor targets, ScalarType dtype, int rank) -> Tensor",
)


@torch.library.impl(_NORM, "CPU")
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (x.float() * rstd)).to(x.dtype), rstd


def _normed_shape(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


@torch.library.impl(_NORM_BACK, "CPU")
def _norm_gradients(
    gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    normalized, scaled = x.float() * rstd, gradient.float() * weight
    to_x = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    to_weight = (gradient.float() * normalized).flatten(0, -2).sum(0)
    return to_x.to(x.dtype), to_weight.to(weight.dtype)


def _norm_gradient_shapes(
    gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.impl(_GATED, "CPU")
def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _gated_shape(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.impl(_GATE_BACK, "CPU")
def _gate_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.silu_backward(gradient * up, gate)
    return result


def _gate_gradient_shape(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.impl(_UP_BACK, "CPU")
def _up_gradient(gradient: Tensor, gate: Tensor) -> Tensor:
    return gradient * torch.nn.functional.silu(gate)


def _up_gradient_shape(gradient: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.impl(_SOFTMAX, "CPU")
def _softmax(scores: Tensor, scale: float) -> Tensor:
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    masked = (scores.float() * scale).masked_fill(is_later, -torch.inf)
    return masked.softmax(-1).to(scores.dtype)


def _softmax_shape(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


@torch.library.impl(_SOFTMAX_BACK, "CPU")
def _score_gradient(gradient: Tensor, softmax: Tensor, scale: float) -> Tensor:
    product = gradient.float() * softmax.float()
    total = product.sum(-1, keepdim=True)
    return ((product - softmax.float() * total) * scale).to(softmax.dtype)


def _score_gradient_shape(gradient: Tensor, softmax: Tensor, scale: float) -> Tensor:
    return torch.empty_like(softmax)


@torch.library.impl(_LOSS, "CPU")
def _losses(logits: Tensor, targets: Tensor, group: int, rank: int) -> tuple[Tensor, Tensor]:
    shifted = logits.float()
    maximum = shifted.amax(-1, keepdim=True)
    local = targets - rank * logits.shape[-1]
    is_here = (local >= 0) & (local < logits.shape[-1])
    if group > 1:
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
    shifted = shifted - maximum
    target_logits = shifted.gather(-1, local.where(is_here, 0).unsqueeze(-1)).squeeze(-1) * is_here
    shifted = shifted.exp()
    total = shifted.sum(-1, keepdim=True)
    if group > 1:
        dist.all_reduce(target_logits)
        dist.all_reduce(total)
    losses = (total.log().squeeze(-1) - target_logits) * (targets >= 0)
    return losses, shifted / total


def _loss_shapes(logits: Tensor, targets: Tensor, group: int, rank: int) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return losses, torch.empty_like(logits, dtype=torch.float32)


@torch.library.impl(_LOSS_BACK, "CPU")
def _logit_gradient(
    softmax: Tensor, gradient: Tensor, targets: Tensor, dtype: torch.dtype, rank: int
) -> Tensor:
    local = targets - rank * softmax.shape[-1]
    is_here = (local >= 0) & (local < softmax.shape[-1])
    one_hot = torch.zeros_like(softmax)
    one_hot.scatter_(-1, local.where(is_here, 0).unsqueeze(-1), is_here.unsqueeze(-1).float())
    return ((softmax - one_hot) * (gradient * (targets >= 0)).unsqueeze(-1)).to(dtype)


def _logit_gradient_shape(
    softmax: Tensor, gradient: Tensor, targets: Tensor, dtype: torch.dtype, rank: int
) -> Tensor:
    return torch.empty_like(softmax, dtype=dtype)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _norm_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
    to_x, to_weight = torch.ops.fxpart._fused_rms_norm_backward(gradient, *ctx.saved_tensors)
    return to_x, to_weight, None


def _keep_gates(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs)


def _gates_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    gate, up = ctx.saved_tensors
    to_gate = torch.ops.fxpart.swiglu_gate_backward(gradient, gate, up)
    return to_gate, torch.ops.fxpart.swiglu_up_backward(gradient, gate)


def _keep_probabilities(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _softmax_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    (softmax,) = ctx.saved_tensors
    return torch.ops.fxpart.causal_softmax_backward(gradient, softmax, ctx.scale), None


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    logits, targets, _, rank = inputs
    ctx.save_for_backward(output[1], targets)
    ctx.of_logits = logits.dtype, rank


def _loss_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
    softmax, targets = ctx.saved_tensors
    result = torch.ops.fxpart.vocab_losses_backward(softmax, gradient, targets, *ctx.of_logits)
    return result, None, None, None


torch.library.register_autograd(_NORM, _norm_backward, setup_context=_keep_norm)
torch.library.register_autograd(_GATED, _gates_backward, setup_context=_keep_gates)
torch.library.register_autograd(_SOFTMAX, _softmax_backward, setup_context=_keep_probabilities)
torch.library.register_autograd(_LOSS, _loss_backward, setup_context=_keep_softmax)
torch.library.register_fake(_NORM, _normed_shape)
torch.library.register_fake(_NORM_BACK, _norm_gradient_shapes)
torch.library.register_fake(_GATED, _gated_shape)
torch.library.register_fake(_GATE_BACK, _gate_gradient_shape)
torch.library.register_fake(_UP_BACK, _up_gradient_shape)
torch.library.register_fake(_SOFTMAX, _softmax_shape)
torch.library.register_fake(_SOFTMAX_BACK, _score_gradient_shape)
torch.library.register_fake(_LOSS, _loss_shapes)
torch.library.register_fake(_LOSS_BACK, _logit_gradient_shape)
