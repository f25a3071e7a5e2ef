"""Shapes of the matrix products and attentions of a graph, from what it keeps of them.

A graph keeps bytes and FLOPs, not shapes. Those of a product follow: of B products of (m, k) with
(k, n), FLOPs 2 B m n k over B m n results give k, and the operands' B m k and B k n the rest.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.curves.attention import ROWS_OF_BLOCK, Attentions
from fxpart.cost.curves.gemm import Products

__all__ = ["Shapes", "shapes_of"]

_BITS = {"float64": 64, "complex64": 64, "float32": 32, "int32": 32, "int64": 64, "complex128": 128}
_FEW_BITS = ("float8", "int8", "uint8")
_OF_MATRICES = ("mm", "addmm", "linear")
"""Products that are one each."""
_NEAR = 0.01
"""How far a number of products may be from a whole one: sizes in bytes are exact, storages not."""


class Shapes(NamedTuple):
    """Which operators are products and which attentions, and their shapes, in order."""

    product_ops: IntArray
    products: Products
    product_calls: IntArray
    """How many such products the operator is: 2 of the backward of a convolution, 1 where its input
    needs no gradient."""
    attention_ops: IntArray
    attentions: Attentions
    is_backward: IntArray
    """Whether the attention is a backward, 1 or 0."""


def shapes_of(graph: OpGraph, layout: str = "") -> Shapes:
    """Return the shapes of all operators of `graph` that compute.

    Those with weights in a `layout` of few bits (`fxpart.core.few_bits`) are left out: their bytes
    say no shape.
    """
    calls = {op: (size, causal) for op, size, causal in graph.attention.tolist()}
    made = np.searchsorted(graph.value_producer, np.arange(graph.n_ops))
    products: list[tuple[float, ...]] = []
    attentions: list[tuple[float, ...]] = []
    for op in np.flatnonzero(graph.flops).tolist():
        target, element = graph.targets[op], _element_bytes(graph.dtypes[op])
        if layout and target.startswith(f"{layout}."):
            continue
        reads = [float(size) / element for size in graph.value_bytes[graph.reads_of(op)]]
        weights = [float(size) / element for size in graph.weight_bytes[graph.uses_of(op)]]
        flops = float(graph.flops[op])
        if op in calls and reads:
            attentions.append((op, *_attention(target, flops, reads, *calls[op]), element))
            continue
        made_one = made[op] < graph.n_values and graph.value_producer[made[op]] == op
        result = float(graph.value_bytes[made[op]]) / element if made_one else 0.0
        if "convolution_backward" in target and weights + reads[1:]:
            # Gradients of the input, unless nobody needs it, and of the weight: each as long as the
            # forward.
            forward = float(graph.flops[graph.forward_of[op]]) or flops / 2
            count = min(2, max(1, round(flops / forward)))
            shape = _convolution(flops / count, reads[0], weights or reads[1:])
            products.append((op, count, *shape, element))
        elif "conv" in target:
            products.append((op, 1, *_convolution(flops, result, weights or reads[1:]), element))
        else:
            products.append((op, 1, *_product(target, flops, result, reads, weights), element))
    return _as_arrays(products, attentions)


def _element_bytes(dtype: str) -> float:
    if dtype.startswith(_FEW_BITS):
        return 1.0
    return _BITS.get(dtype, 16) / 8


def _product(
    target: str, flops: float, result: float, reads: list[float], weights: list[float]
) -> tuple[float, float, float, float]:
    """Return B, m, n, k; a square product of the same FLOPs where sizes do not say."""
    if "baddbmm" in target and len(reads) + len(weights) > 2:
        reads = reads[1:]  # what is added
    sizes = [*reads, *weights]
    name = target.split(".")[-2] if "." in target else target
    if result <= 0:
        side = (flops / 2) ** (1 / 3)
        return 1.0, side, side, side
    k = flops / (2 * result)
    # A tensor that is multiplied with itself is read once.
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]] or [
        (size, size) for size in sizes
    ]
    best: tuple[float, float, float, float] | None = None
    for left, right in sorted(pairs, key=lambda pair: -pair[0] * pair[1]):
        batch = left * right / (k * k * result)
        whole = max(1.0, float(round(batch)))
        if name in _OF_MATRICES and whole > 1:
            continue  # one of the two is a bias
        if abs(batch - whole) <= _NEAR * whole and left and right:
            best = (whole, left / (whole * k), right / (whole * k), k)
            break
    side = result**0.5
    return best or (1.0, side, side, k)


def _convolution(
    flops: float, result: float, kernels: list[float]
) -> tuple[float, float, float, float]:
    """Return the product that a convolution is: rows are places, columns are channels."""
    if result <= 0:
        return _product("", flops, result, [], [])
    k = max(1.0, flops / (2 * result))
    columns = max(kernels, default=0.0) / k
    if not 1 <= columns <= result:
        columns = result**0.5
    return 1.0, result / columns, columns, k


def _attention(
    target: str, flops: float, reads: list[float], size: int, causal: int
) -> tuple[float, ...]:
    """Return whether it is a backward, and batch, queries, keys, heads, key heads, size, causal.

    Sequences and heads are told apart only as far as time depends on them: `batch` is 1 where each
    head has keys of its own.
    """
    backward = "backward" in target
    # A tensor that is query and key at once is read once.
    query, key = (reads + reads[-1:] * 2)[1:3] if backward else (reads + reads[-1:])[:2]
    # Of 2 B H Sq Sk times D and Dv; in a backward five products in place of two.
    keys = max(1.0, flops / (query * (10 if backward else 4)))
    rows, key_heads = query / size, max(1.0, key / (keys * size))
    queries = keys if rows >= keys * key_heads else max(1.0, rows / key_heads)
    if queries < keys and queries <= ROWS_OF_BLOCK and not backward:
        # Heads that share keys come as queries of one head, too. A library reads keys once for so
        # few rows, whichever they are, and splits them over multiprocessors.
        queries = 1.0
    heads = max(key_heads, rows / queries)
    return float(backward), 1.0, queries, keys, heads, key_heads, float(size), float(causal)


def _as_arrays(products: list[tuple[float, ...]], attentions: list[tuple[float, ...]]) -> Shapes:
    of_products = np.array(products, dtype=np.float64).reshape(-1, 7)
    of_attentions = np.array(attentions, dtype=np.float64).reshape(-1, 10)
    batch, m, n, k, element = of_products[:, 2:].T
    _, queries, keys, heads, key_heads, size, causal, bytes_each = of_attentions[:, 2:].T
    none = np.zeros(len(of_attentions))
    return Shapes(
        of_products[:, 0].astype(np.int64),
        Products(batch, m, n, k, element, element),
        of_products[:, 1].astype(np.int64),
        of_attentions[:, 0].astype(np.int64),
        Attentions(none + 1, queries, keys, heads, key_heads, size, none, causal, bytes_each, none),
        of_attentions[:, 1].astype(np.int64),
    )
