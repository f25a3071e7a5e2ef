"""Operators limited by memory bandwidth: the share of it that each kind reaches."""

import re
from collections.abc import Mapping

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph

__all__ = ["KINDS", "BandwidthShares", "bandwidth_shares", "kind_of"]

BandwidthShares = Mapping[str, tuple[float, float]]
"""Shares of the peak memory bandwidth by kind, for all dtypes but float16 and bfloat16, and for
those two."""
_PATTERNS = {
    "batch_norm_backward": r"batch_norm\w*_backward",
    "batch_norm_training": r"\.native_batch_norm",
    "batch_norm": r"batch_norm",
    "layer_norm_backward": r"layer_norm\w*_backward",
    "layer_norm": r"layer_norm",
    "softmax_backward": r"softmax_backward",
    "softmax": r"softmax",
    "max_pool_backward": r"max_pool\w*_backward",
    "max_pool": r"max_pool\w*_with_indices",
    "max_pool_inference": r"max_pool",
}
"""The first that matches an operator's target is its kind."""
_POINTWISE = "pointwise"
KINDS = (_POINTWISE, *_PATTERNS)
_BY_CHANNEL = ("batch_norm_training", "batch_norm_backward")
"""Reductions in which one multiprocessor handles a whole channel."""
_CHANNEL_BYTES = 24
"""A weight, a bias, the running mean and variance, and the mean and deviation that are saved, in
float32, as with autocast too; in a norm entirely of 16 bits half of the channels are counted."""


def kind_of(target: str) -> str:
    """Return the kind of an operator, one of `KINDS`."""
    return next(
        (kind for kind, pattern in _PATTERNS.items() if re.search(pattern, target)), _POINTWISE
    )


def bandwidth_shares(
    graph: OpGraph, shares: BandwidthShares, multiprocessors: int, *, fused: bool
) -> FloatArray:
    """Return the share of memory bandwidth that each operator reaches, shape (n,).

    Kinds without a share of their own have that of pointwise operators; so has every operator if
    `fused`, since ``torch.compile`` generates its kernels.
    """
    kinds = {target: _POINTWISE if fused else kind_of(target) for target in set(graph.targets)}
    result = np.empty(graph.n_ops)
    for op, (target, dtype) in enumerate(zip(graph.targets, graph.dtypes, strict=True)):
        kind = kinds[target]
        of_32_bits, of_16_bits = shares.get(kind, shares[_POINTWISE])
        result[op] = of_16_bits if dtype in ("bfloat16", "float16") else of_32_bits
        if kind in _BY_CHANNEL:
            result[op] *= min(1.0, _channels(graph, op) / multiprocessors)
    return result


def _channels(graph: OpGraph, op: int) -> float:
    """Return the channels of a batch norm in train mode, or of its backward; infinite if unknown.

    A backward reads a mean and a deviation for each, saved in float32. A forward reads and writes
    six numbers for each, beside its input and result. Sizes of weights may be rounded up.
    """
    values = graph.value_bytes[graph.reads_of(op)]
    if not len(values):
        return np.inf
    if "backward" in graph.targets[op]:
        return float(values.min()) / 4
    channels = (float(graph.moved_bytes[op]) - 2 * float(values.max())) / _CHANNEL_BYTES
    return channels if channels >= 1 else np.inf
