"""`compute_loss_on_shards`: cross entropy of logits that a group holds in parts of the vocabulary.

It computes what torch's `torch.distributed.tensor.parallel.loss_parallel` does for a head whose
outputs stay split: three all-reduces of a number for each position instead of gathered logits.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fxpart.errors import NotApplicableError
from fxpart.sharding.collectives import all_reduce, largest_of_group

__all__ = ["compute_loss_on_shards"]

_LOSS_TYPE = "ForCausalLM"
_IGNORED = -100


def compute_loss_on_shards(module: nn.Module, group: int, rank: int) -> None:
    """Replace the loss of a transformers causal language model, whose head is split, in place.

    Raises:
        NotApplicableError: if the model computes another loss.

    """
    if getattr(module, "loss_type", None) != _LOSS_TYPE:
        raise NotApplicableError(
            "loss_parallel=true splits the cross entropy of transformers' causal language models "
            f"over their vocabulary, {type(module).__name__} is not one; set loss_parallel=false"
        )
    module.loss_function = partial(_loss_of_shards, (group, rank))  # type: ignore[assignment]


def _loss_of_shards(
    place: tuple[int, int],
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,  # noqa: ANN401
) -> Tensor:
    """Return the mean cross entropy of next tokens, with the signature of `ForCausalLMLoss`.

    `place` is the number of devices in the group, and the rank of this one.
    """
    logits = logits.float()
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    targets, logits = shift_labels.view(-1), logits.view(-1, logits.shape[-1])
    is_counted = targets != ignore_index
    total: Tensor = _CrossEntropy.apply(logits, targets, is_counted, place)  # type: ignore[no-untyped-call]
    return total / (is_counted.sum() if num_items_in_batch is None else num_items_in_batch)


class _CrossEntropy(Function):
    """The sum of the cross entropies of rows, which saves one tensor of the size of the logits."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        is_counted: Tensor,
        place: tuple[int, int],
    ) -> Tensor:
        """Return the sum over rows.

        Args:
            ctx: what the backward reads.
            logits: logits of this device's part of the vocabulary. Shape (rows, vocabulary / N).
            targets: indices into the whole vocabulary. Shape (rows,).
            is_counted: whether a row has a target. Shape (rows,).
            place: N, the number of devices that share the vocabulary, and the rank of this one.

        """
        group, rank = place
        shifted = logits - largest_of_group(logits.amax(1, keepdim=True), group)
        sums = all_reduce(shifted.exp().sum(1, keepdim=True), group)
        log_probabilities = shifted - sums.log()
        local = targets - rank * logits.shape[1]
        is_here = is_counted & (local >= 0) & (local < logits.shape[1])
        local = torch.where(is_here, local, 0).unsqueeze(1)
        own = log_probabilities.gather(1, local).squeeze(1)
        of_targets = all_reduce(torch.where(is_here, own, 0), group)
        ctx.save_for_backward(log_probabilities, local, is_here, is_counted)
        return -of_targets.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        """Return the gradient of the local logits, without communication."""
        log_probabilities, local, is_here, is_counted = ctx.saved_tensors
        one_hot = torch.zeros_like(log_probabilities)
        one_hot.scatter_(1, local, -is_here.to(one_hot.dtype).unsqueeze(1))
        of_rows = torch.where(is_counted, gradient, 0).unsqueeze(1)
        return (one_hot + log_probabilities.exp()) * of_rows, None, None, None
