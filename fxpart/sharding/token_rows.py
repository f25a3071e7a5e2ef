"""Slice token rows over devices with the same batch, and gather them again.

A device of a tensor-parallel group sees every token of its replica. To send each token to its
experts only once, devices take a slice each: torch's ``redistribute`` from ``Replicate()`` to
``Shard(0)``, and back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fxpart.sharding.collectives import place_in, process_group

__all__ = ["gather_rows", "own_rows"]

_OWN, _GATHERED, _GATHER = "fxpart::own_rows", "fxpart::gathered_rows", "fxpart::all_gather.rows"


def own_rows(x: Tensor, group: int) -> Tensor:
    """Return this device's slice of the rows of `x`; the gradient is gathered over the group."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _slice(x, group)
    result: Tensor = torch.ops.fxpart.own_rows(x, group)
    return result


def gather_rows(x: Tensor, count: int, group: int) -> Tensor:
    """Gather the `count` rows of which `x` is this device's slice; the gradient is sliced."""
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = torch.ops.fxpart.gathered_rows(x, count, group)
        return result
    return torch.ops.fxpart.all_gather.rows(x, count, group)  # type: ignore[no-any-return]


def _rows_of_one(count: int, group: int) -> int:
    """Return the rows per slice; the last slices may be shorter."""
    return (count + group - 1) // group


def _slice(x: Tensor, group: int) -> Tensor:
    rows = _rows_of_one(len(x), group)
    return x[place_in(group) * rows :][:rows].clone()


class _OwnRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:  # noqa: ANN401
        ctx.whole = len(x), group
        return _slice(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return torch.ops.fxpart.all_gather.rows(gradient, *ctx.whole), None


class _GatheredRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: int) -> Tensor:  # noqa: ANN401
        ctx.group = group
        result: Tensor = torch.ops.fxpart.all_gather.rows(x, count, group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _slice(gradient, ctx.group), None, None


def _apply_own(x: Tensor, group: int) -> Tensor:
    result: Tensor = _OwnRows.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _apply_gathered(x: Tensor, count: int, group: int) -> Tensor:
    result: Tensor = _GatheredRows.apply(x, count, group)  # type: ignore[no-untyped-call]
    return result


torch.library.define(_OWN, "(Tensor x, int group) -> Tensor")
torch.library.define(_GATHERED, "(Tensor x, int count, int group) -> Tensor")
torch.library.define(_GATHER, "(Tensor x, int count, int group) -> Tensor")
torch.library.impl(_OWN, "CompositeImplicitAutograd", _apply_own)
torch.library.impl(_GATHERED, "CompositeImplicitAutograd", _apply_gathered)


@torch.library.impl(_GATHER, "CPU")
def _gathered(x: Tensor, count: int, group: int) -> Tensor:
    rows = _rows_of_one(count, group)
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    whole = x.new_empty((group * rows, *x.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=process_group(group))
    return whole[:count].clone()


def _gathered_shape(x: Tensor, count: int, group: int) -> Tensor:
    return x.new_empty((count, *x.shape[1:]))


torch.library.register_fake(_GATHER, _gathered_shape)
