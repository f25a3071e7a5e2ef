"""Bytes that one call reads from and writes to device memory."""

from collections.abc import Iterable

import torch

__all__ = ["dense_bytes", "moved_bytes", "touched_bytes"]

# They read a few rows of their first operand, not all of it.
_GATHERS = ("embedding", "index", "index_select", "gather", "take")


def dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements, densely packed: what a transfer carries."""
    return int(tensor.numel()) * tensor.element_size()


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the distinct bytes that reading the tensor touches; broadcasts touch less."""
    if tensor.layout is not torch.strided:
        return dense_bytes(tensor)
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(size) if stride != 0 else min(int(size), 1)
    return elements * tensor.element_size()


def moved_bytes(
    operator: str,
    inputs: Iterable[torch.Tensor],
    made: Iterable[torch.Tensor],
    mutated: Iterable[torch.Tensor],
) -> int:
    """Return bytes read plus bytes written by `operator` (its bare name, such as ``embedding``).

    `made` are outputs with storage of their own and `mutated` inputs that are written; a call
    that has neither is a view, or checks metadata, and moves nothing. A gather, whose first input
    is the table, reads its indices and the rows that it returns; a bag of embeddings reads a row
    for each index and returns their sums.
    """
    inputs, made, mutated = list(inputs), list(made), list(mutated)
    if not made and not mutated:
        return 0
    written = sum(dense_bytes(t) for t in made) + sum(touched_bytes(t) for t in mutated)
    if operator in _GATHERS:
        return sum(touched_bytes(t) for t in inputs[1:]) + 2 * written
    if operator == "embedding_bag":
        table, indices = inputs[0], inputs[1]
        row_bytes = int(table.shape[-1]) * table.element_size()
        rows = int(indices.numel()) * row_bytes
        return sum(touched_bytes(t) for t in inputs[1:]) + rows + written
    return sum(touched_bytes(t) for t in inputs) + written
