"""`split_context`: context parallelism, with a piece of every sequence and all weights per device.

Attention gathers the keys and values of the whole sequence, again in its backward, and
reduce-scatters their gradients: Llama 3 (arXiv:2407.21783, section 3.3.2), Megatron-LM's
``--cp-comm-type all_gather``, and torchtitan's default, ``context_parallel_rotate_method =
"allgather"``. Sequences are cut into 2 N chunks, of which device i has the i-th and the i-th last,
which balances the work under a causal mask.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import NotApplicableError
from fxpart.sharding.collectives import gather_context

__all__ = [
    "attend_fused",
    "attentions_of",
    "is_causal_alone",
    "like_query",
    "looks_up_attention",
    "positions_of",
    "register_attention",
    "split_context",
    "with_positions",
]

_NAME = "fxpart_context"
_ATTEND, _ATTEND_BACK = (
    "fxpart::context_attention",
    "fxpart::context_attention_backward",
)


def split_context(module: nn.Module, group: int, rank: int = 0) -> nn.Module:
    """Make `module`, a transformers decoder, run on the piece of device `rank`; return it.

    Its input ids are those of the device, in the order of `positions_of`.

    Raises:
        NotApplicableError: if the model's attention is not plain causal attention over all earlier
            positions, but windowed for example.

    """
    if group == 1:
        return module
    config: Any = getattr(module, "config", None)
    layers = _decoder(module)
    names = list(inspect.signature(type(layers).forward).parameters)[1:]
    attentions = attentions_of(module)
    is_causal = bool(attentions) and all(part.is_causal is True for part in attentions)
    if config is None or "position_ids" not in names or not is_causal:
        raise _refused(module, group, "is not a transformers decoder that takes positions")
    if getattr(config, "sliding_window", None) is not None:
        raise _refused(module, group, f"sees a window of {config.sliding_window} tokens")
    if reason := _not_attention_alone(layers, config):
        raise _refused(module, group, reason)
    attend_fused(module, group, rank)
    own_positions = partial(positions_of, group=group, rank=rank)
    layers.forward = partial(with_positions, layers.forward, names, own_positions)
    return module


def attend_fused(module: nn.Module, group: int = 1, rank: int = 0) -> None:
    """Run the causal attention of `module` as one kernel, for any head dimensions."""
    register_attention(_NAME, _attend)
    config: Any = module.config
    config._attn_implementation = _NAME
    for part in attentions_of(module):
        part.context_group = group, rank


def register_attention(name: str, attend: Callable[..., Any]) -> None:
    """Register `attend`, which needs no mask, as an attention implementation of transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _no_mask)


def is_causal_alone(module: nn.Module) -> bool:
    """Return whether each layer of `module` has a replaceable, plain causal attention."""
    config: Any = getattr(module, "config", None)
    return (
        all(part.is_causal is True for part in attentions_of(module))
        and getattr(config, "sliding_window", None) is None
        and not _not_attention_alone(_decoder(module), config)
    )


def _decoder(module: nn.Module) -> nn.Module:
    """Return the decoder in `module`, which is itself unless it is a transformers model.

    The captured inputs are those of `module`, which may skip the forwards between the two.
    """
    model: Any = module
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder


def _not_attention_alone(layers: nn.Module, config: Any) -> str:  # noqa: ANN401
    """Return why `_attend` cannot replace all attention in `layers`; empty if it can."""
    attentions = attentions_of(layers)
    if not all(looks_up_attention(part) for part in attentions):
        return "has its own attention code, which cannot be replaced"
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        return f"sees chunks of {chunk} tokens"
    count, depth = len(attentions), getattr(config, "num_hidden_layers", None)
    if count != depth:
        return f"has such attention in {count} of {depth} layers"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return f"has layers of kind {', '.join(sorted(others))}" if others else ""


def looks_up_attention(attention: nn.Module) -> bool:
    """Return whether `attention` calls the implementation named by its configuration."""
    forward = inspect.unwrap(type(attention).forward)
    return "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def attentions_of(module: nn.Module) -> list[Any]:
    """Return the attention modules of transformers in `module`, in order."""
    return [part for part in module.modules() if hasattr(part, "is_causal")]


def positions_of(count: int, group: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return the `count` positions of a sequence on device `rank`, in order."""
    half = torch.arange(count // 2, device=device)
    chunk = count // 2
    return torch.cat([half + rank * chunk, half + (2 * group - 1 - rank) * chunk])


def _refused(module: nn.Module, group: int, reason: str) -> NotApplicableError:
    return NotApplicableError(
        f"context_parallel={group} gathers keys and values of causal attention,"
        f" {type(module).__name__} {reason}; set context_parallel=1, or choose another model"
    )


def _no_mask(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as transformers calls it
    """Make no mask, since the attention derives it from positions."""


def with_positions(
    forward: Any,  # noqa: ANN401
    names: list[str],
    positions: Callable[..., Tensor],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Call `forward`, whose parameters have `names`, adding positions if they are missing.

    `positions` returns the positions for a number of ids, on a device.
    """
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    ids = arguments["input_ids"]
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = positions(ids.shape[1], device=ids.device).unsqueeze(0)
    return forward(**arguments)


_OTHER_ATTENTION = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Arguments of transformers attention that no kernel here supports."""


def refuse_other_attention(settings: Mapping[str, object]) -> None:
    """Refuse attention with more than a causal mask.

    Raises:
        NotApplicableError: if an unsupported argument is set.

    """
    others = [name for name in _OTHER_ATTENTION if settings.get(name) is not None]
    if others:
        raise NotApplicableError(
            f"attention with {', '.join(others)} has no kernel in engine=megatron or"
            " context_parallel; set engine=torch and context_parallel=1"
        )


def _attend(  # noqa: PLR0917 - as transformers calls it
    module: Any,  # noqa: ANN401
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend from this device's queries to the whole sequence; shape (B, S / N, H, D)."""
    refuse_other_attention(settings)
    group, rank = module.context_group
    # Only the part of the cache that the prompt has filled.
    keys, values = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
    if group > 1:
        # Positions come before heads in memory, so pieces are gathered without a copy.
        keys, values = (
            gather_context(part.transpose(1, 2), group).transpose(1, 2) for part in (keys, values)
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    result, _ = torch.ops.fxpart.context_attention(query, keys, values, scale, True, group, rank)
    return result.transpose(1, 2).contiguous(), None


torch.library.define(
    _ATTEND,
    "(Tensor query, Tensor key, Tensor value, float scale, bool is_causal, int group, int rank)"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    _ATTEND_BACK,
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor result, Tensor log_sums,"
    " float scale, bool is_causal, int group, int rank) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _scores(query: Tensor, key: Tensor, scale: float, group: int, rank: int) -> Tensor:
    """Return the scaled scores in float32, minus infinity for keys after the query."""
    count = query.shape[2]
    is_later = torch.arange(count * group) > positions_of(count, group, rank).unsqueeze(1)
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    return scores.masked_fill(is_later, float("-inf"))


def _per_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


@torch.library.impl(_ATTEND, "CPU")
def _attended(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    group: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, _per_query_head(key, query), scale, group, rank)
    attended = scores.softmax(-1) @ _per_query_head(value, query).float()
    result = like_query(query, value)
    result.copy_(attended)
    return result, scores.logsumexp(-1)


def like_query(query: Tensor, value: Tensor) -> Tensor:
    """Allocate the result with positions before heads in memory, as flash attention does."""
    batch, heads, count, _ = query.shape
    return query.new_empty((batch, count, heads, value.shape[-1])).transpose(1, 2)


def _attended_shapes(query: Tensor, key: Tensor, value: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return like_query(query, value), sums


@torch.library.impl(_ATTEND_BACK, "CPU")
def _gradients(  # noqa: PLR0917
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    log_sums: Tensor,
    scale: float,
    is_causal: bool,
    group: int,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys, values = _per_query_head(key, query).float(), _per_query_head(value, query).float()
    weights = (_scores(query, keys, scale, group, rank) - log_sums.unsqueeze(-1)).exp()
    gradient_f32 = gradient.float()
    score_gradients = weights * (
        gradient_f32 @ values.transpose(-2, -1) - (gradient_f32 * result).sum(-1, keepdim=True)
    )
    to_query = score_gradients @ keys * scale
    to_key = score_gradients.transpose(-2, -1) @ query.float() * scale
    to_value = weights.transpose(-2, -1) @ gradient_f32
    gradients = _gradient_shapes(gradient, query, key, value, group, rank)
    shared = (len(key), key.shape[1], -1, key.shape[2])
    for target, head_gradient in zip(gradients[1:3], (to_key, to_value), strict=True):
        target.copy_(head_gradient.view(*shared, head_gradient.shape[-1]).sum(2))
    gradients[0].copy_(to_query)
    return gradients


def _gradient_shapes(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients, and what a call of the kernel makes of them for the later chunk.

    The kernel is called for each chunk of queries with the keys up to its end, which for the first
    device are all; its results are added up.
    """
    rooms = (t.transpose(1, 2) for t in (query, key, value))
    to_query, to_key, to_value = (t.new_empty(t.shape).transpose(1, 2) for t in rooms)
    group = others[-2]
    of_chunk = query.numel() // 2 + key.numel() + value.numel()
    return to_query, to_key, to_value, query.new_empty(of_chunk if group != 1 else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.call = inputs[3:]


def _attend_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:  # noqa: ANN401
    gradients = torch.ops.fxpart.context_attention_backward(gradient, *ctx.saved_tensors, *ctx.call)
    return (*gradients[:3], None, None, None, None)


torch.library.register_fake(_ATTEND, _attended_shapes)
torch.library.register_fake(_ATTEND_BACK, _gradient_shapes)
torch.library.register_autograd(_ATTEND, _attend_backward, setup_context=_keep)
