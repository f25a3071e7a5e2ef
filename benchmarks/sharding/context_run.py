"""Run a model with context parallelism: keys and values are gathered chunk by chunk.

Follows Megatron-LM's ``--cp-comm-type all_gather``, with `torch.distributed` and torch's fused
kernels: gathers in sequence order, an attention call for each of a device's two chunks with the
keys up to its end, and gathers again in the backward.
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
    """Return the two of the 2 `size` chunks of a sequence that a device holds."""
    return rank, 2 * size - 1 - rank


def piece(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the two chunks of the second dimension of `whole`, one after the other."""
    parts = whole.chunk(2 * size, dim=1)
    return torch.cat([parts[number] for number in chunks(rank, size)], dim=1)


def context_run(rank: int, size: int, spec: ModelSpec) -> Counted:
    """Return the counts of this process; `spec` describes whole sequences."""
    with seeded(0, CPU):
        built = build_model(replace(spec, context_parallel=1), CPU)
    module: Any = built.module
    inputs = built.kwargs
    if size > 1:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, **__: None)
        module.config._attn_implementation = _NAME
        positions = torch.arange(spec.seq_len or 0).unsqueeze(0)
        inputs = {
            "input_ids": piece(inputs["input_ids"], rank, size),
            "position_ids": piece(positions, rank, size),
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


def _gather(part: Tensor) -> Tensor:
    """Return the keys or values of all devices in the order of the sequence."""
    size = dist.get_world_size()
    own = part.transpose(1, 2).contiguous()
    parts = own.new_empty((size, *own.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), own)
    by_chunk: list[Any] = [None] * (2 * size)
    for rank in range(size):
        for number, chunk in zip(chunks(rank, size), parts[rank].chunk(2, dim=1), strict=True):
            by_chunk[number] = chunk
    return torch.cat(by_chunk, dim=1).transpose(1, 2)


def _reduce_scatter(whole: Tensor) -> Tensor:
    """Return this device's piece of `whole` summed over all devices."""
    size = dist.get_world_size()
    by_chunk = whole.transpose(1, 2).chunk(2 * size, dim=1)
    batch, count, *others = by_chunk[0].shape
    parts = whole.new_empty((size, batch, 2 * count, *others))
    for rank in range(size):
        for target, number in zip(parts[rank].chunk(2, dim=1), chunks(rank, size), strict=True):
            target.copy_(by_chunk[number])
    own = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1))
    return own.transpose(1, 2)


def _mask(count: int, end: int) -> Tensor:
    """Return the causal mask of the last `count` of `end` positions."""
    return torch.ones(count, end, dtype=torch.bool).tril(end - count)


class _Chunks(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ANN401
        keys, values = _gather(key), _gather(value)
        outputs = [
            _FORWARD(*call[:5], attn_mask=call[5], scale=scale)
            for call in _calls(query, keys, values)
        ]
        result = torch.cat([out for out, _ in outputs], dim=2)
        ctx.save_for_backward(query, key, value, result, torch.cat([s for _, s in outputs], dim=-2))
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, result, sums = ctx.saved_tensors
        keys, values = _gather(key), _gather(value)
        to_query = torch.empty_like(query)
        to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
        parts = (t.chunk(2, -2) for t in (to_query, gradient, result, sums))
        calls = zip(_calls(query, keys, values), *parts, strict=True)
        del keys, values
        for (q, k, v, *_, mask), target, out_gradient, out, total in calls:
            gradients = _BACKWARD(
                out_gradient, q, k, v, out, total, 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            target.copy_(gradients[0])
            to_keys[:, :, : k.shape[2]] += _sum_groups(gradients[1], to_keys.shape[1])
            to_values[:, :, : v.shape[2]] += _sum_groups(gradients[2], to_values.shape[1])
            del q, k, v, gradients
        return to_query, _reduce_scatter(to_keys), _reduce_scatter(to_values), None


def _sum_groups(gradient: Tensor, count: int) -> Tensor:
    """Return the sum over the heads of each of `count` groups."""
    if gradient.shape[1] == count:
        return gradient
    return gradient.view(len(gradient), count, -1, *gradient.shape[2:]).sum(2)


def _calls(query: Tensor, keys: Tensor, values: Tensor) -> list[tuple[Any, ...]]:
    """Return the arguments of an attention call for each chunk of queries."""
    size, rank = dist.get_world_size(), dist.get_rank()
    width, groups = query.shape[2] // 2, query.shape[1] // keys.shape[1]
    keys_and_values = [keys, values]
    if groups > 1:  # not supported by this kernel
        keys_and_values = [t.repeat_interleave(groups, dim=1) for t in keys_and_values]
    calls = []
    for part, number in zip(query.chunk(2, dim=2), chunks(rank, size), strict=True):
        end = (number + 1) * width
        mask = torch.zeros(width, end).masked_fill(~_mask(width, end), float("-inf"))
        calls.append(
            (part, keys_and_values[0][:, :, :end], keys_and_values[1][:, :, :end], 0.0, False, mask)
        )
    return calls
