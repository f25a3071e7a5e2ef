"""Per-weight state resident on a device: optimizer state, gradient buckets."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["with_state"]


def with_state(graph: OpGraph, weights: IntArray, tensors: Sequence[IntArray]) -> OpGraph:
    """Return `graph` with further state tensors for its weights.

    Args:
        graph: its existing weight state is kept.
        weights: indices of weights; repeated if a weight has several parts. Shape (G,).
        tensors: bytes of each kind of tensor for each of `weights`. Shape (G,) each.

    """
    state_bytes = graph.weight_state_bytes
    rows = list(graph.state_tensor_bytes)
    if not rows and state_bytes.any():
        rows.append(state_bytes)
    part = _parts(weights)
    for number in range(int(part.max(initial=-1)) + 1):
        of_part = part == number
        for sizes in tensors:
            row = np.zeros_like(state_bytes)
            row[weights[of_part]] = sizes[of_part]
            rows.append(row)
    if not rows:
        return graph
    stacked = np.stack(rows)
    return replace(graph, weight_state_bytes=stacked.sum(axis=0), state_tensor_bytes=stacked)


def _parts(weights: IntArray) -> IntArray:
    """Return the number of earlier occurrences of each item of `weights`. Shape (G,)."""
    latest_part: dict[int, int] = {}
    parts = []
    for weight in weights.tolist():
        latest_part[weight] = latest_part.get(weight, -1) + 1
        parts.append(latest_part[weight])
    return np.array(parts, dtype=np.int64)
