"""Operators limited by memory bandwidth: the share of it that each kind reaches."""

import re
from collections.abc import Mapping

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph

__all__ = ["KINDS", "BandwidthShares", "bandwidth_shares", "kind_of"]

BandwidthShares = Mapping[str, tuple[float, float]]
"""Shares of the peak memory bandwidth by kind, for elements of at least 32 bits and for others."""
_PATTERNS = {
    "batch_norm_backward": r"batch_norm\w*_backward",
    "batch_norm_training": r"\.(native|cudnn)_batch_norm",
    "batch_norm": r"batch_norm",
    "layer_norm_backward": r"layer_norm\w*_backward",
    "layer_norm": r"layer_norm",
    "softmax_backward": r"softmax_backward",
    "softmax": r"softmax",
    "max_pool_backward": r"max_pool\w*_backward",
    "max_pool": r"max_pool",
}
"""The first that matches an operator's target is its kind."""
_POINTWISE = "pointwise"
KINDS = (_POINTWISE, *_PATTERNS)
_BY_CHANNEL = ("batch_norm_training", "batch_norm_backward")
"""Reductions in which one multiprocessor handles a whole channel."""


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
    """Return the channels of a normalization, whose weights are float32; infinite without any."""
    weights = graph.weight_bytes[graph.uses_of(op)]
    return float(weights.max()) / 4 if len(weights) and weights.max() > 0 else np.inf
