"""`as_megatron`: replace a transformers model's kernels with those of Megatron-LM."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import NotApplicableError
from fxpart.sharding.context import (
    attend_fused,
    is_causal_alone,
    refuse_other_attention,
    register_attention,
)
from fxpart.sharding.fused import causal_softmax, gated, rms_norm, vocabulary_losses

__all__ = ["as_megatron"]

_EPS = ("variance_epsilon", "eps")
_PRODUCTS = "fxpart_products"


def as_megatron(module: nn.Module, group: int = 1, rank: int = 0) -> nn.Module:
    """Replace the norms, gates and loss of a causal language model with fused ones, in place.

    Attention computed as separate products gets one fused kernel between them. The logits cover
    this device's part of the vocabulary. The loss is the mean over all positions except the last;
    labels must not mask any.

    Raises:
        NotApplicableError: if the model has no head and loss of its own.

    """
    head: Any = getattr(module, "lm_head", None)
    if not isinstance(head, nn.Linear) or not hasattr(module, "loss_function"):
        raise NotApplicableError(
            "engine=megatron trains causal language models of transformers (lm_head), "
            f"{type(module).__name__} is not one; set engine=torch"
        )
    for part in module.modules():
        parts = dict(part.named_children())
        eps = next((getattr(part, name) for name in _EPS if hasattr(part, name)), None)
        if isinstance(eps, float) and _is_rms_norm(part, eps):
            part.forward = partial(_normed, part, eps)
        elif _is_silu(parts.get("act_fn")) and {"gate_proj", "up_proj"} <= set(parts):
            part.forward = partial(_gated, part)
        elif _is_silu(parts.get("act_fn")) and hasattr(part, "_apply_gate"):
            part._apply_gate = _gated_halves  # type: ignore[assignment]
    config: Any = module.config
    if getattr(config, "v_head_dim", None) is not None:
        # In latent attention values are narrower than keys, which torch's kernels do not support.
        attend_fused(module)
    elif config._attn_implementation == "eager" and is_causal_alone(module):
        register_attention(_PRODUCTS, _attend)
        config._attn_implementation = _PRODUCTS
    module.loss_function = partial(_mean_loss, group, rank)  # type: ignore[assignment]
    return module


def _attend(  # noqa: PLR0917 - as transformers calls it
    module: Any,  # noqa: ANN401
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Compute causal attention, with the signature that transformers expects."""
    refuse_other_attention(settings)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    weights = causal_softmax(query @ key.transpose(2, 3), scaling)
    weights = nn.functional.dropout(weights, dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _is_rms_norm(part: nn.Module, eps: float) -> bool:
    """Return whether a norm computes the same as the fused one for any weight.

    Gemma's multiplies by 1 + weight, and others also take a gate: these are not replaced.
    """
    weight = getattr(part, "weight", None)
    if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return False
    if len(inspect.signature(part.forward).parameters) != 1:
        return False
    x = torch.linspace(-1.0, 2.0, weight.numel(), device="cpu").reshape(1, -1)
    scale = torch.linspace(0.5, 1.5, weight.numel(), device="cpu")
    result = torch.func.functional_call(part, {"weight": scale}, (x,))
    return torch.allclose(result, rms_norm(x, scale, eps), atol=1e-5)


def _is_silu(activation: nn.Module | None) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _normed(norm: Any, eps: float, x: Tensor) -> Tensor:  # noqa: ANN401
    return rms_norm(x, norm.weight, eps)


def _gated(mlp: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    result: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    return result


def _gated_halves(both: Tensor) -> Tensor:
    """Apply the gates of experts, which are concatenated with the gated values."""
    return gated(*both.chunk(2, dim=-1))


def _mean_loss(
    group: int,
    rank: int,
    logits: Tensor,
    labels: Tensor,
    *_: Any,  # noqa: ANN401 - the size of the vocabulary, which classes give by place or by name
    **__: Any,  # noqa: ANN401
) -> Tensor:
    targets = torch.nn.functional.pad(labels, (0, 1), value=-1)[:, 1:]
    losses = vocabulary_losses(logits, targets, group, rank)
    return losses.sum(-1).mean() / (labels.shape[1] - 1)
