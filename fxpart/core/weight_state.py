"""Bytes kept on a device for a weight: an optimizer's state, a bucket of its gradient."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["with_state"]


def with_state(graph: OpGraph, weights: IntArray, tensors: Sequence[IntArray]) -> OpGraph:
    """Return `graph` with further tensors beside its weights.

    Args:
        graph: its weight state is kept and added to.
        weights: numbers of weights; repeated where a weight has several tensors of state.
            Shape (G,).
        tensors: bytes, of each kind one tensor for each of `weights`. Shape (G,) each.

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
    """Return how often each item of `weights` has come before. Shape (G,)."""
    seen: dict[int, int] = {}
    parts = []
    for weight in weights.tolist():
        seen[weight] = seen.get(weight, -1) + 1
        parts.append(seen[weight])
    return np.array(parts, dtype=np.int64)
