"""Recover the shapes of matrix products and attention from bytes and FLOPs.

A graph has bytes and FLOPs but no shapes. For B products of (m, k) by (k, n), dividing the 2 B m n
k FLOPs by the B m n results gives k, and the operand sizes B m k and B k n give the rest.
"""

import math
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.curves.attention import ROWS_OF_BLOCK, Attentions
from fxpart.cost.curves.gemm import Products

__all__ = ["Shapes", "shapes_of"]

_BITS = {"float64": 64, "complex64": 64, "float32": 32, "int32": 32, "int64": 64, "complex128": 128}
_FEW_BITS = ("float8", "int8", "uint8")
_OF_MATRICES = ("mm", "addmm", "linear")
"""Products without a batch dimension."""
_ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that kernels load at once."""
_TRANSPOSES = ("aten.t.", "aten.transpose.", "aten.permute.", "aten.mT.")
_NEAR = 0.01
"""Relative tolerance of an integral batch: sizes in bytes are exact, storage sizes are not."""


class Shapes(NamedTuple):
    """The products and attention calls of a graph with their shapes, in order."""

    product_ops: IntArray
    products: Products
    product_calls: IntArray
    """Number of such products per operator: 2 for a convolution's backward, unless its input needs
    no gradient, else 1."""
    product_alignment: IntArray
    """Largest power of two, up to `_ALIGNED`, that divides the lengths of the rows of operands and
    result, in elements."""
    has_bias: IntArray
    """1 for a product to which a bias is added, else 0."""
    is_convolution: IntArray
    is_gradient: IntArray
    """1 for the gradients of a convolution, else 0."""
    layout_bytes: IntArray
    """Bytes that a convolution with kernels of more than one pixel reads and writes if it changes
    the layout of its input and result; 0 for other products."""
    attention_ops: IntArray
    attentions: Attentions
    is_backward: IntArray
    """1 for the backward of attention, else 0."""


def shapes_of(graph: OpGraph, layout: str = "") -> Shapes:
    """Return the shapes of all operators of `graph` with FLOPs.

    Products with weights in a quantized `layout` (`fxpart.core.few_bits`) are left out, as their
    bytes do not determine a shape.
    """
    calls = {op: (size, causal) for op, size, causal in graph.attention.tolist()}
    first_value = np.searchsorted(graph.value_producer, np.arange(graph.n_ops))
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
        has_result = (
            first_value[op] < graph.n_values and graph.value_producer[first_value[op]] == op
        )
        result = float(graph.value_bytes[first_value[op]]) / element if has_result else 0.0
        if "convolution_backward" in target and weights + reads[1:]:
            # The gradients of the weight and, if needed, of the input each take as long as the
            # forward.
            forward = float(graph.flops[graph.forward_of[op]]) or flops / 2
            count = min(2, max(1, round(flops / forward)))
            shape = _convolution(flops / count, reads[0], weights or reads[1:])
            rewritten = _layout_elements(shape, reads[1:2]) * element
            products.append((op, count, _ALIGNED, 0, 1, 1, rewritten, *shape, element))
        elif "conv" in target:
            shape = _convolution(flops, result, weights or reads[1:])
            rewritten = _layout_elements(shape, reads[:1]) * element
            products.append((op, 1, _ALIGNED, 0, 1, 0, rewritten, *shape, element))
        else:
            shape = _product(target, flops, result, reads, weights)
            alignment = _alignment(graph, op, shape)
            has_bias = ".addmm." in target or (
                ".linear." in target and len(reads) + len(weights) > 2
            )
            products.append((op, 1, alignment, has_bias, 0, 0, 0, *shape, element))
    return _as_arrays(products, attentions)


def _element_bytes(dtype: str) -> float:
    if dtype.startswith(_FEW_BITS):
        return 1.0
    return _BITS.get(dtype, 16) / 8


def _product(
    target: str, flops: float, result: float, reads: list[float], weights: list[float]
) -> tuple[float, float, float, float]:
    """Return B, m, n, k; a square product of the same FLOPs if the sizes do not determine them."""
    if "baddbmm" in target and len(reads) + len(weights) > 2:
        reads = reads[1:]  # the addend
    sizes = [*reads, *weights]
    name = target.split(".")[-2] if "." in target else target
    if result <= 0:
        side = (flops / 2) ** (1 / 3)
        return 1.0, side, side, side
    k = flops / (2 * result)
    # A tensor multiplied by itself is read once.
    pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]] or [
        (size, size) for size in sizes
    ]
    best: tuple[float, float, float, float] | None = None
    for left, right in sorted(pairs, key=lambda pair: -pair[0] * pair[1]):
        batch = left * right / (k * k * result)
        rounded_batch = max(1.0, float(round(batch)))
        if name in _OF_MATRICES and rounded_batch > 1:
            continue  # one of the two is a bias
        if abs(batch - rounded_batch) <= _NEAR * rounded_batch and left and right:
            best = (rounded_batch, left / (rounded_batch * k), right / (rounded_batch * k), k)
            break
    side = result**0.5
    return best or (1.0, side, side, k)


def _alignment(graph: OpGraph, op: int, shape: tuple[float, float, float, float]) -> int:
    """Return the alignment of the rows of a product.

    Rows of the left operand have k elements, those of the right one and of the result n; rows of a
    transposed operand are as long as its other side. Guessed shapes count as aligned.
    """
    _, m, n, k = shape
    if any(size != round(size) for size in (m, n, k)):
        return _ALIGNED
    is_linear = ".linear." in graph.targets[op]  # whose weight is (n, k)
    values = graph.reads_of(op).tolist()
    operands = values[:2] if is_linear else values[-2:]  # what is left out is added
    transposed = [_is_transposed(graph, value) for value in operands]
    # One that is not read is a weight, which is the right operand.
    left, right = (*transposed, False, False)[:2]
    sizes = (m if left else k, k if right != is_linear else n, n)
    return math.gcd(_ALIGNED, *(round(size) for size in sizes))


def _is_transposed(graph: OpGraph, value: int) -> bool:
    maker = int(graph.value_producer[value])
    return maker >= 0 and graph.targets[maker].startswith(_TRANSPOSES)


def _convolution(
    flops: float, result: float, kernels: list[float]
) -> tuple[float, float, float, float]:
    """Return a convolution as a product: rows are positions, columns are output channels."""
    if result <= 0:
        return _product("", flops, result, [], [])
    k = max(1.0, flops / (2 * result))
    columns = max(kernels, default=0.0) / k
    if not 1 <= columns <= result:
        columns = result**0.5
    return 1.0, result / columns, columns, k


def _layout_elements(shape: tuple[float, float, float, float], inputs: list[float]) -> float:
    """Return the elements read and written to change the layouts of input and result.

    With kernels of one pixel and without strides, each element of the input is in one row.
    """
    _, m, n, k = shape
    if not inputs or abs(m * k - inputs[0]) <= _NEAR * inputs[0]:
        return 0.0
    return 2 * (inputs[0] + m * n)


def _attention(
    target: str, flops: float, reads: list[float], size: int, causal: int
) -> tuple[float, ...]:
    """Return whether it is a backward, and batch, queries, keys, heads, key heads, size, causal.

    Sequences are folded into heads as far as the time does not depend on the difference: `batch` is
    always 1.
    """
    backward = "backward" in target
    # A tensor that is both query and key is read once.
    query, key = (reads + reads[-1:] * 2)[1:3] if backward else (reads + reads[-1:])[:2]
    # FLOPs are 2 B H Sq Sk (D + Dv); the backward has five products instead of two.
    keys = max(1.0, flops / (query * (10 if backward else 4)))
    rows, key_heads = query / size, max(1.0, key / (keys * size))
    queries = keys if rows >= keys * key_heads else max(1.0, rows / key_heads)
    if queries < keys and queries <= ROWS_OF_BLOCK and not backward:
        # Heads that share keys may also appear as queries of one head. For so few rows a library
        # reads keys once in either case, and splits them over multiprocessors.
        queries = 1.0
    heads = max(key_heads, rows / queries)
    return float(backward), 1.0, queries, keys, heads, key_heads, float(size), float(causal)


def _as_arrays(products: list[tuple[float, ...]], attentions: list[tuple[float, ...]]) -> Shapes:
    of_products = np.array(products, dtype=np.float64).reshape(-1, 12)
    of_attentions = np.array(attentions, dtype=np.float64).reshape(-1, 10)
    batch, m, n, k, element = of_products[:, 7:].T
    _, queries, keys, heads, key_heads, size, causal, bytes_each = of_attentions[:, 2:].T
    none = np.zeros(len(of_attentions))
    return Shapes(
        of_products[:, 0].astype(np.int64),
        Products(batch, m, n, k, element, element),
        of_products[:, 1].astype(np.int64),
        of_products[:, 2].astype(np.int64),
        of_products[:, 3].astype(np.int64),
        of_products[:, 4].astype(np.int64),
        of_products[:, 5].astype(np.int64),
        of_products[:, 6].astype(np.int64),
        of_attentions[:, 0].astype(np.int64),
        Attentions(none + 1, queries, keys, heads, key_heads, size, none, causal, bytes_each, none),
        of_attentions[:, 1].astype(np.int64),
    )
