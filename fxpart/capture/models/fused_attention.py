"""``attn_implementation=fused``: attention of transformers with sinks and windows as one kernel.

Transformers computes attention with sinks (gpt-oss) or a soft cap (Gemma 2) as products, with keys
and values repeated for each query head. Inference engines have kernels that take both, derive masks
from positions, and skip keys outside of a window. A capture with this implementation has one
operator for each such call. It has no backward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError
from fxpart.sharding.context import (
    attentions_of,
    like_query,
    looks_up_attention,
    register_attention,
)

__all__ = ["FUSED", "check_fused", "register_fused"]

FUSED = "fused"
"""The value of ``attn_implementation``."""
_OPERATOR = "fxpart::fused_attention"
_UNLIKE = ("position_bias", "head_mask", "is_causal")
"""Arguments of transformers attention that the kernel does not take."""

torch.library.define(
    _OPERATOR,
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, float scale, bool is_causal,"
    " float cap, int window) -> Tensor",
)


def register_fused() -> None:
    """Make ``fused`` an attention implementation of transformers."""
    register_attention(FUSED, _attend)


def check_fused(model: nn.Module) -> None:
    """Refuse a model of transformers whose attention the kernel does not compute.

    Raises:
        SpecError: if an attention does not call the configured implementation, or is not causal, or
            masks more than later positions and those outside of a window.

    """
    attentions = attentions_of(model)
    config: Any = model.config
    reason = ""
    if not attentions or not all(looks_up_attention(part) for part in attentions):
        reason = "has attention code of its own, which cannot be replaced"
    elif config.is_encoder_decoder or not all(part.is_causal is True for part in attentions):
        reason = "has attention that is not causal"
    elif getattr(config.get_text_config(), "attention_chunk_size", None) is not None:
        reason = "sees chunks of tokens, which the kernel does not mask"
    if reason:
        raise SpecError(
            f"attn_implementation={FUSED} replaces attention that transformers looks up,"
            f" {type(model).__name__} {reason}; leave out model.config.attn_implementation"
        )


def _attend(  # noqa: PLR0917 - as transformers calls it
    _module: Any,  # noqa: ANN401
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend from the last positions, those of the queries, to all before; shape (B, S, H, D)."""
    if others := [name for name in _UNLIKE if settings.get(name) is not None]:
        raise SpecError(
            f"attn_implementation={FUSED} does not take {', '.join(others)}; leave it out"
        )
    count = query.shape[2]
    is_token = isinstance(count, int) and count == 1
    if not is_token:  # only the part of the cache that the prompt has filled
        key, value = key[:, :, :count], value[:, :, :count]
    # One token is the last, and the cache of a windowed layer is no longer than the window.
    window = 0 if is_token else sliding_window or 0
    is_causal = not is_token and not window
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    result = torch.ops.fxpart.fused_attention(
        query, key, value, s_aux, scale, is_causal, float(softcap or 0.0), window
    )
    return result.transpose(1, 2).contiguous(), None


@torch.library.impl(_OPERATOR, "CompositeExplicitAutograd")
def _attended(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    is_causal: bool,
    cap: float,
    window: int,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.float() @ keys.transpose(-2, -1) * scale
    if cap:
        scores = (scores / cap).tanh() * cap
    if is_causal or window:
        place = torch.arange(scores.shape[-1], device=query.device)
        distance = place.unsqueeze(1) - place
        is_unseen = (distance < 0) | (distance >= window if window else False)
        scores = scores.masked_fill(is_unseen, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    result = like_query(query, value)
    result.copy_(weights @ values)
    return result


def _result_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:  # noqa: ANN401
    return like_query(query, value)


def _no_backward(*_: object) -> None:
    raise SpecError(
        f"attn_implementation={FUSED} has no backward; leave out model.config.attn_implementation"
        " in training"
    )


torch.library.register_fake(_OPERATOR, _result_shape)
torch.library.register_autograd(_OPERATOR, _no_backward)
