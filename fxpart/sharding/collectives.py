"""Collectives of a tensor-parallel group as operators, captured by shape.

A capture needs no process group, since each operator has the size of its group as an argument. When
run with data, it communicates with that many neighbours in `torch.distributed`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

__all__ = [
    "IN_ORDER",
    "all_gather",
    "all_reduce",
    "embedded_rows",
    "gather_context",
    "gather_sequence",
    "largest_of_group",
    "place_in",
    "process_group",
    "scatter_sequence",
    "sum_gradient",
]

_REDUCE, _GATHER = "fxpart::all_reduce", "fxpart::all_gather"
_LARGEST = "fxpart::all_reduce.max"
_SUM, _JOIN = "fxpart::sum_gradient", "fxpart::joined_parts"
_ROWS = "fxpart::embedded_rows"
_SCATTER = "fxpart::reduce_scatter"
_ENTER, _LEAVE = "fxpart::gathered_sequence", "fxpart::scattered_sequence"
_AGAIN, _GATHER_AGAIN = "fxpart::gathered_again", "fxpart::all_gather.again"
_IN_PLACE, _SCATTER_IN_PLACE = "fxpart::scattered_in_place", "fxpart::reduce_scatter.in_place"
_CONTEXT, _GATHER_CONTEXT = "fxpart::gathered_context", "fxpart::all_gather.context"
_SCATTER_CONTEXT = "fxpart::reduce_scatter.context"
IN_ORDER, _BY_DEVICE = "fxpart::in_order", "fxpart::by_device"
_SCHEMA = "(Tensor x, int group) -> Tensor"
_Step = Callable[[Tensor, int], Tensor]
_SEQUENCE = 1
"""The sequence dimension, after the batch."""


def all_reduce(x: Tensor, group: int) -> Tensor:
    """Return the sum of `x` over the group, in new memory; its gradient is the identity."""
    result: Tensor = torch.ops.fxpart.all_reduce(x, group)
    return result


def largest_of_group(x: Tensor, group: int) -> Tensor:
    """Return the elementwise maximum of `x` over the group, in new memory; it has no gradient."""
    result: Tensor = torch.ops.fxpart.all_reduce.max(x, group)
    return result


def all_gather(x: Tensor, group: int) -> Tensor:
    """Gather along the last dimension; the gradient is sliced.

    Collectives concatenate along the first dimension, so this needs another copy.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = torch.ops.fxpart.joined_parts(x, group)
        return result
    return _joined(x, group, -1)


def gather_sequence(x: Tensor, group: int, *, again: bool = False) -> Tensor:
    """Gather positions over the group; the gradient is reduce-scattered.

    With `again`, a captured step gathers again in the backward instead of saving the result.
    """
    if again:
        whole: Tensor = torch.ops.fxpart.gathered_again(x, group)
        return whole
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = torch.ops.fxpart.gathered_sequence(x, group)
        return result
    return _joined(x, group, _SEQUENCE)


def gather_context(x: Tensor, group: int) -> Tensor:
    """Gather the positions of all devices that share a sequence, in sequence order.

    Each device holds two chunks of it, an early and a late one, so what is gathered is copied into
    sequence order, and gradients back into rank order. A captured step gathers again in the
    backward. The gradient is reduce-scattered.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = torch.ops.fxpart.gathered_context(x, group)
        return result
    return _context_gathered(x, group)


def scatter_sequence(x: Tensor, group: int, *, in_place: bool = False) -> Tensor:
    """Reduce-scatter `x` along the sequence; the gradient is gathered.

    With `in_place` nothing is copied, as if positions came before the batch.
    """
    if in_place:
        piece: Tensor = torch.ops.fxpart.scattered_in_place(x, group)
        return piece
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = torch.ops.fxpart.scattered_sequence(x, group)
        return result
    return _scattered_positions(x, group)


def sum_gradient(x: Tensor, group: int) -> Tensor:
    """Return `x` unchanged; its gradient is summed over the group."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    result: Tensor = torch.ops.fxpart.sum_gradient(x, group)
    return result


def embedded_rows(
    ids: Tensor, weight: Tensor, group: int, rank: int, *, whole_gradient: bool = True
) -> Tensor:
    """Look up `ids` in `weight`, this device's part of a table, with zeros for ids of other parts.

    The gradient is computed for the whole table, of which the part is a view, as with DTensors; or
    just for the part without `whole_gradient`.
    """
    if whole_gradient and torch.is_grad_enabled() and weight.requires_grad:
        result: Tensor = torch.ops.fxpart.embedded_rows(ids, weight, group, rank)
        return result
    return _looked_up(ids, weight, rank)


def place_in(group: int) -> int:
    """Return the rank of this process in its group of `group` neighbours, 0 without processes."""
    return dist.get_rank() % group if dist.is_initialized() else 0


def process_group(size: int) -> dist.ProcessGroup | None:
    """Return this process's group of `size` neighbours; None for the group of all processes.

    The first call is collective, as all processes create their groups together.
    """
    return None if size == dist.get_world_size() else _neighbours(size, dist.group.WORLD)


@cache
def _neighbours(size: int, world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group within `world`, which is part of the cache key as it may change."""
    group: dist.ProcessGroup = dist.new_subgroups(size)[0]  # type: ignore[no-untyped-call]
    return group


torch.library.define(_REDUCE, _SCHEMA)
torch.library.define(_LARGEST, _SCHEMA)
torch.library.define(_GATHER, _SCHEMA)
torch.library.define(_ROWS, "(Tensor ids, Tensor weight, int group, int rank) -> Tensor")
torch.library.define(_SCATTER, _SCHEMA)
torch.library.define(_GATHER_AGAIN, _SCHEMA)
torch.library.define(_SCATTER_IN_PLACE, _SCHEMA)
torch.library.define(_GATHER_CONTEXT, _SCHEMA)
torch.library.define(_SCATTER_CONTEXT, _SCHEMA)
torch.library.define(IN_ORDER, _SCHEMA)
torch.library.define(_BY_DEVICE, _SCHEMA)


def _reduced(x: Tensor, group: int, operation: dist.ReduceOp.RedOpType) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=process_group(group))
    return result


torch.library.impl(_REDUCE, "CPU", partial(_reduced, operation=dist.ReduceOp.SUM))
torch.library.impl(_LARGEST, "CPU", partial(_reduced, operation=dist.ReduceOp.MAX))


def _reduced_shape(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl(_GATHER, "CPU")
def _gathered(x: Tensor, group: int) -> Tensor:
    result = x.new_empty((group, *x.shape))
    dist.all_gather_into_tensor(result.flatten(0, 1), x.contiguous(), group=process_group(group))
    return result


def _gathered_shape(x: Tensor, group: int) -> Tensor:
    return x.new_empty((group, *x.shape))


@torch.library.impl(_SCATTER, "CPU")
def _scattered(x: Tensor, group: int) -> Tensor:
    result = x.new_empty(x.shape[1:])
    parts = x.contiguous().flatten(0, 1)
    dist.reduce_scatter_tensor(result, parts, group=process_group(group))
    return result


def _scattered_shape(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape[1:])


def _gathered_positions(x: Tensor, group: int) -> Tensor:
    parts = torch.ops.fxpart.all_gather.default(x, group)
    return torch.cat(torch.unbind(parts), dim=_SEQUENCE)


def _gathered_positions_shape(x: Tensor, group: int) -> Tensor:
    # In Megatron positions come before the batch, so gathered parts are contiguous.
    return x.new_empty((x.shape[0], group * x.shape[_SEQUENCE], *x.shape[2:]))


def _scattered_sequence(x: Tensor, group: int) -> Tensor:
    parts = torch.stack(torch.chunk(x, group, dim=_SEQUENCE))
    piece: Tensor = torch.ops.fxpart.reduce_scatter.default(parts, group)
    return piece


def _scattered_sequence_shape(x: Tensor, group: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[_SEQUENCE] // group, *x.shape[2:]))


for _name in (_GATHER_AGAIN, _GATHER_CONTEXT):
    torch.library.impl(_name, "CPU", _gathered_positions)
for _name in (_SCATTER_IN_PLACE, _SCATTER_CONTEXT):
    torch.library.impl(_name, "CPU", _scattered_sequence)
torch.library.register_fake(_SCATTER_IN_PLACE, _scattered_sequence_shape)
torch.library.register_fake(_GATHER_AGAIN, _gathered_positions_shape)
torch.library.register_fake(_GATHER_CONTEXT, _gathered_positions_shape)
torch.library.register_fake(_SCATTER_CONTEXT, _scattered_sequence_shape)
for _name in (_REDUCE, _LARGEST):
    torch.library.register_fake(_name, _reduced_shape)
torch.library.register_fake(_SCATTER, _scattered_shape)
torch.library.register_fake(_GATHER, _gathered_shape)


def _same(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    return gradient, None


torch.library.register_autograd(_REDUCE, _same)


def _joined(x: Tensor, group: int, dim: int) -> Tensor:
    parts = torch.ops.fxpart.all_gather(x, group)
    if dim == _SEQUENCE and x.shape[0] == 1:  # the parts are already contiguous
        whole: Tensor = parts.reshape(1, group * x.shape[1], *x.shape[2:])
        return whole
    return torch.cat(torch.unbind(parts), dim=dim)


def _scattered_positions(x: Tensor, group: int) -> Tensor:
    if x.shape[0] == 1:
        parts = x.reshape(group, 1, x.shape[1] // group, *x.shape[2:])
    else:
        parts = torch.stack(torch.chunk(x, group, dim=_SEQUENCE))
    result: Tensor = torch.ops.fxpart.reduce_scatter(parts, group)
    return result


def _own_part(gradient: Tensor, group: int) -> Tensor:
    return torch.chunk(gradient, group, dim=-1)[place_in(group)].contiguous()


_gathered_once_more: _Step = torch.ops.fxpart.all_gather.again
_scattered_as_it_lies: _Step = torch.ops.fxpart.reduce_scatter.in_place


def _chunk_places(group: int) -> list[int]:
    """Return which of 2 `group` chunks of a sequence lie one after the other, device by device."""
    return [chunk for rank in range(group) for chunk in (rank, 2 * group - 1 - rank)]


@torch.library.impl(IN_ORDER, "CPU")
def _in_order(x: Tensor, group: int) -> Tensor:
    parts, places = torch.chunk(x, 2 * group, dim=_SEQUENCE), _chunk_places(group)
    return torch.cat([parts[places.index(chunk)] for chunk in range(2 * group)], dim=_SEQUENCE)


@torch.library.impl(_BY_DEVICE, "CPU")
def _by_device(x: Tensor, group: int) -> Tensor:
    parts = torch.chunk(x, 2 * group, dim=_SEQUENCE)
    return torch.cat([parts[chunk] for chunk in _chunk_places(group)], dim=_SEQUENCE)


def _copied_shape(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape)


torch.library.register_fake(IN_ORDER, _copied_shape)
torch.library.register_fake(_BY_DEVICE, _copied_shape)


def _context_gathered(x: Tensor, group: int) -> Tensor:
    whole: Tensor = torch.ops.fxpart.in_order(torch.ops.fxpart.all_gather.context(x, group), group)
    return whole


def _context_scattered(x: Tensor, group: int) -> Tensor:
    by_device = torch.ops.fxpart.by_device(x, group)
    piece: Tensor = torch.ops.fxpart.reduce_scatter.context(by_device, group)
    return piece


def _define(name: str, forward: _Step, backward: _Step, schema: str = _SCHEMA) -> None:
    """Define an operator from `forward`, with `backward` as its gradient."""

    class Collective(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: int) -> Tensor:  # noqa: ANN401
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
            return backward(gradient, ctx.group), None

    def apply(x: Tensor, group: int) -> Tensor:
        result: Tensor = Collective.apply(x, group)  # type: ignore[no-untyped-call]
        return result

    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeImplicitAutograd", apply)


# Megatron's `f` (Shoeybi et al., arXiv:1909.08053): the identity, with an all-reduced gradient.
_define(_SUM, lambda x, _: x.view_as(x), all_reduce, "(Tensor(a) x, int group) -> Tensor(a)")
_define(_JOIN, lambda x, group: _joined(x, group, -1), _own_part)
# `g` of its sequence parallelism (Korthikanti et al., arXiv:2205.05198), and the conjugate.
_define(_ENTER, lambda x, group: _joined(x, group, _SEQUENCE), _scattered_positions)
_define(_LEAVE, _scattered_positions, lambda x, group: _joined(x, group, _SEQUENCE))
# The same two, by operators of which a captured step repeats the gather in its backward.
_define(_AGAIN, _gathered_once_more, _scattered_as_it_lies)
_define(_CONTEXT, _context_gathered, _context_scattered)
_define(_IN_PLACE, _scattered_as_it_lies, _gathered_once_more)


class _EmbeddedRows(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        ids: Tensor,
        weight: Tensor,
        group: int,
        rank: int,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.place = len(weight), group, rank
        return _looked_up(ids, weight, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:  # noqa: ANN401
        (ids,) = ctx.saved_tensors
        rows, group, rank = ctx.place
        whole = torch.ops.aten.embedding_dense_backward(gradient, ids, rows * group, -1, False)
        return None, whole.narrow(0, rows * rank, rows), None, None


def _looked_up(ids: Tensor, weight: Tensor, rank: int) -> Tensor:
    first = len(weight) * rank
    is_remote = (ids < first) | (ids >= first + len(weight))
    rows = torch.nn.functional.embedding(torch.where(is_remote, 0, ids - first), weight)
    return rows.masked_fill(is_remote.unsqueeze(-1), 0)


def _apply_rows(ids: Tensor, weight: Tensor, group: int, rank: int) -> Tensor:
    result: Tensor = _EmbeddedRows.apply(ids, weight, group, rank)  # type: ignore[no-untyped-call]
    return result


torch.library.impl(_ROWS, "CompositeImplicitAutograd", _apply_rows)
