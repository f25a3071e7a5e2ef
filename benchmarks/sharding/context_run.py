"""A model really run with context parallelism: keys and values gathered, chunk by chunk.

Written as Megatron-LM's ``--cp-comm-type all_gather`` is, of `torch.distributed` and torch's fused
kernels: gathers put in order, a call of attention for each of a device's two chunks with the keys
up to its end, gathers once more in the backward.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.sharding.tensor_run import CPU, Counted, counted_run
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded

__all__ = ["chunks", "context_run", "piece"]

_NAME = "gathered_chunks"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def chunks(rank: int, size: int) -> tuple[int, int]:
    """Return which of 2 `size` chunks of a sequence a device has."""
    return rank, 2 * size - 1 - rank


def piece(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the two chunks of the second dimension of `whole`, one after the other."""
    parts = whole.chunk(2 * size, dim=1)
    return torch.cat([parts[number] for number in chunks(rank, size)], dim=1)


def context_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return what this process counts; `spec` is of whole sequences."""
    with seeded(0, CPU):
        built = build_model(replace(spec, context_parallel=1), CPU)
    module: Any = built.module
    inputs = built.kwargs
    if size > 1:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, **__: None)
        module.config._attn_implementation = _NAME
        places = torch.arange(spec.seq_len or 0).unsqueeze(0)
        inputs = {
            "input_ids": piece(inputs["input_ids"], rank, size),
            "position_ids": piece(places, rank, size),
        }
    return counted_run(module, inputs)


def _attend(  # noqa: PLR0917 - as transformers calls it
    module: Any,  # noqa: ANN401
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **_: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    result: Tensor = _Chunks.apply(query, key, value, scaling)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


def _gathered(part: Tensor) -> Tensor:
    """Return the keys or values of all devices in the order of the sequence."""
    size = dist.get_world_size()
    mine = part.transpose(1, 2).contiguous()
    parts = mine.new_empty((size, *mine.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), mine)
    by_chunk: list[Any] = [None] * (2 * size)
    for rank in range(size):
        for number, chunk in zip(chunks(rank, size), parts[rank].chunk(2, dim=1), strict=True):
            by_chunk[number] = chunk
    return torch.cat(by_chunk, dim=1).transpose(1, 2)


def _scattered(whole: Tensor) -> Tensor:
    """Return this device's piece of the sum of gradients of `whole`."""
    size = dist.get_world_size()
    by_chunk = whole.transpose(1, 2).chunk(2 * size, dim=1)
    batch, count, *others = by_chunk[0].shape
    parts = whole.new_empty((size, batch, 2 * count, *others))
    for rank in range(size):
        for room, number in zip(parts[rank].chunk(2, dim=1), chunks(rank, size), strict=True):
            room.copy_(by_chunk[number])
    mine = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(mine, parts.flatten(0, 1))
    return mine.transpose(1, 2)


def _mask(count: int, end: int) -> Tensor:
    """Return the mask of the last `count` of `end` positions."""
    return torch.ones(count, end, dtype=torch.bool).tril(end - count)


class _Chunks(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ANN401
        keys, values = _gathered(key), _gathered(value)
        made = [
            _FORWARD(*call[:5], attn_mask=call[5], scale=scale)
            for call in _calls(query, keys, values)
        ]
        result = torch.cat([out for out, _ in made], dim=2)
        ctx.save_for_backward(query, key, value, result, torch.cat([s for _, s in made], dim=-2))
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, result, sums = ctx.saved_tensors
        keys, values = _gathered(key), _gathered(value)
        to_query = torch.empty_like(query)
        to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
        parts = (t.chunk(2, -2) for t in (to_query, gradient, result, sums))
        calls = zip(_calls(query, keys, values), *parts, strict=True)
        del keys, values
        for (q, k, v, *_, mask), room, slope, out, total in calls:
            made = _BACKWARD(
                slope, q, k, v, out, total, 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            room.copy_(made[0])
            to_keys[:, :, : k.shape[2]] += _of_groups(made[1], to_keys.shape[1])
            to_values[:, :, : v.shape[2]] += _of_groups(made[2], to_values.shape[1])
            del q, k, v, made
        return to_query, _scattered(to_keys), _scattered(to_values), None


def _of_groups(gradient: Tensor, count: int) -> Tensor:
    """Return the sum over the heads of each of `count` groups."""
    if gradient.shape[1] == count:
        return gradient
    return gradient.view(len(gradient), count, -1, *gradient.shape[2:]).sum(2)


def _calls(query: Tensor, keys: Tensor, values: Tensor) -> list[tuple[Any, ...]]:
    """Return the arguments of a call for each chunk of queries."""
    size, rank = dist.get_world_size(), dist.get_rank()
    width, groups = query.shape[2] // 2, query.shape[1] // keys.shape[1]
    every = [keys, values]
    if groups > 1:  # which this kernel does not know
        every = [t.repeat_interleave(groups, dim=1) for t in every]
    calls = []
    for part, number in zip(query.chunk(2, dim=2), chunks(rank, size), strict=True):
        end = (number + 1) * width
        mask = torch.zeros(width, end).masked_fill(~_mask(width, end), float("-inf"))
        calls.append((part, every[0][:, :, :end], every[1][:, :, :end], 0.0, False, mask))
    return calls
