"""Recover the shapes of matrix products and attention from bytes and FLOPs.

A graph has bytes and FLOPs but no shapes. For B products of (m, k) by (k, n), dividing the 2 B m n
k FLOPs by the B m n results gives k, and the operand sizes B m k and B k n give the rest.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.absorbed import ABSORBED
from fxpart.core.few_bits import is_routed, keys_and_values
from fxpart.core.graph import MOST_KEPT_GRAPHS, IntArray, OpGraph
from fxpart.cost.curves.attention import ROWS_OF_BLOCK, Attentions
from fxpart.cost.curves.convolution import Convolutions, layout_elements
from fxpart.cost.curves.gemm import Products

__all__ = ["Shapes", "shapes_of"]

_BITS = {"float64": 64, "complex64": 64, "float32": 32, "int32": 32, "int64": 64, "complex128": 128}
_FEW_BITS = ("float8", "int8", "uint8")
_OF_MATRICES = ("mm", "addmm", "linear")
"""Products without a batch dimension."""
_ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that kernels load at once."""
_TRANSPOSES = ("aten.t.", "aten.transpose.", "aten.permute.", "aten.mT.")
_CASTS = ("aten.to.", "aten._to_copy.", "aten.contiguous.", "aten.view.", "aten.reshape.")
_NEAR = 0.01
"""Relative tolerance of an integral batch: sizes in bytes are exact, storage sizes are not."""


class _Product(NamedTuple):
    """A product of a graph; sizes may be no whole numbers."""

    op: int
    calls: int
    """Number of such products: 2 for a convolution's backward, unless its input needs no gradient,
    else 1."""
    batch: float
    m: float
    n: float
    k: float
    element: float
    """Bytes per element."""
    alignment: int = _ALIGNED
    """Largest power of two, up to `_ALIGNED`, that divides the lengths of the rows of operands and
    result, in elements."""
    has_bias: bool = False
    is_convolution: bool = False
    is_gradient: bool = False
    """Whether these are gradients of a convolution."""
    layout_elements: float = 0.0
    """See `fxpart.cost.curves.convolution.layout_elements`."""
    reads_input: bool = False
    """Whether it is a convolution that reads the model's input."""


class Shapes(NamedTuple):
    """The products and attention calls of a graph with their shapes, in order."""

    product_ops: IntArray
    products: Products
    product_calls: IntArray
    """See `_Product`, as for the next four."""
    product_alignment: IntArray
    has_bias: npt.NDArray[np.bool_]
    is_convolution: npt.NDArray[np.bool_]
    is_gradient: npt.NDArray[np.bool_]
    convolutions: Convolutions
    """Of those products that are convolutions."""
    attention_ops: IntArray
    attentions: Attentions
    is_backward: IntArray
    """1 for the backward of attention, else 0."""
    kept_bytes: npt.NDArray[np.float64]
    """Bytes per element of keys and values cached in fewer bits, by call; 0 for others."""

    @property
    def uniform_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes per element of each attention call; 0 if its cache has fewer than its queries."""
        return np.where(self.kept_bytes > 0, 0.0, self.attentions.element_bytes)

    def channels_last(self) -> "Shapes":
        """Return the same with convolutions that need no change of layout."""
        none = np.zeros_like(self.convolutions.layout_bytes)
        return self._replace(convolutions=self.convolutions._replace(layout_bytes=none))


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def shapes_of(graph: OpGraph, layout: str = "", cache_share: float = 1.0) -> Shapes:
    """Return the shapes of all operators of `graph` with FLOPs.

    `cache_share` is that of `fxpart.core.few_bits.cache_share` if keys and values are cached in
    fewer bits.

    Products with weights in a quantized `layout` (`fxpart.core.few_bits`) are left out, as their
    bytes do not determine a shape, and so is attention that no fused kernel takes, whose time is
    the traffic of its scores, and attention with absorbed projections.
    """
    calls = {op: (size, causal) for op, size, causal in graph.attention.tolist()}
    products: list[_Product] = []
    attentions: list[tuple[float, ...]] = []
    stored = np.ones(graph.n_values)
    if cache_share != 1:
        stored[keys_and_values(graph)[0]] = cache_share
    for op in np.flatnonzero(graph.flops).tolist():
        target, element = graph.targets[op], _element_bytes(graph.dtypes[op])
        if target.startswith(ABSORBED) or (layout and target.startswith(f"{layout}.")):
            continue
        values = graph.reads_of(op)
        reads = (graph.value_bytes[values] / (stored[values] * element)).tolist()
        if op in calls and reads:
            flops, share = float(graph.flops[op]), float(stored[values].min())
            kept_bytes = element * share if share != 1 else 0.0
            shape = _attention(target, flops, reads, *calls[op])
            attentions.append((op, *shape, element, kept_bytes))
        elif "attention" in target:
            continue
        elif "conv" in target:
            products.append(_convolution(graph, op, reads, element))
        else:
            products.append(_matrix_product(graph, op, reads, element))
    return _as_arrays(products, attentions)


def _weights(graph: OpGraph, op: int, element: float) -> list[float]:
    return [float(size) / element for size in graph.weight_bytes[graph.uses_of(op)]]


def _result(graph: OpGraph, op: int, element: float) -> float:
    """Return the elements of the first result; 0 without one."""
    first = int(np.searchsorted(graph.value_producer, op))
    if first < graph.n_values and graph.value_producer[first] == op:
        return float(graph.value_bytes[first]) / element
    return 0.0


def _element_bytes(dtype: str) -> float:
    if dtype.startswith(_FEW_BITS):
        return 1.0
    return _BITS.get(dtype, 16) / 8


def _matrix_product(graph: OpGraph, op: int, reads: list[float], element: float) -> _Product:
    target, weights = graph.targets[op], _weights(graph, op, element)
    shape = _shape(target, float(graph.flops[op]), _result(graph, op, element), reads, weights)
    if is_routed(graph, op):
        shape = _with_read_experts(shape, float(graph.moved_bytes[op]) / element)
    is_linear_with_bias = ".linear." in target and len(reads) + len(weights) > 2
    return _Product(
        op,
        1,
        *shape,
        element,
        alignment=_alignment(graph, op, shape),
        has_bias=".addmm." in target or is_linear_with_bias,
    )


def _shape(
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


def _with_read_experts(
    shape: tuple[float, float, float, float], moved: float
) -> tuple[float, float, float, float]:
    """Return the products of the experts that are read, where few tokens choose few of all.

    `moved` is the number of elements that move: their weights, and the rows before and after.
    """
    experts, m, n, k = shape
    rows = m * experts
    if rows <= experts:  # with more, all may be read, and rows may be skipped
        moved -= rows * (n + k)
    read = max(1.0, float(round(experts * min(1.0, moved / (experts * n * k)))))
    return read, m * experts / read, n, k


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


def _convolution(graph: OpGraph, op: int, reads: list[float], element: float) -> _Product:
    """Return a convolution as a product: rows are positions, columns are output channels."""
    target, flops = graph.targets[op], float(graph.flops[op])
    weights = _weights(graph, op, element)
    is_gradient = "convolution_backward" in target and bool(weights + reads[1:])
    count, result, place = 1, _result(graph, op, element), 0
    if is_gradient:
        # The gradients of the weight and, if needed, of the input each take the forward's FLOPs.
        forward = float(graph.flops[graph.forward_of[op]]) or flops / 2
        count, result, place = min(2, max(1, round(flops / forward))), reads[0], 1
    inputs = reads[place] if len(reads) > place else 0.0
    kernels = weights or reads[1:] if is_gradient else weights + reads[1:]
    m, n, k = _implicit_product(flops / count, result, kernels)
    reads_input = inputs > 0 and _is_input(graph, int(graph.reads_of(op)[place]))
    return _Product(
        op,
        count,
        1.0,
        m,
        n,
        k,
        element,
        is_convolution=True,
        is_gradient=is_gradient,
        layout_elements=layout_elements(m, n, k, inputs, reads_input=reads_input),
        reads_input=reads_input,
    )


def _implicit_product(
    flops: float, result: float, kernels: list[float]
) -> tuple[float, float, float]:
    """Return m, n, k; a square product of the same FLOPs without a result."""
    if result <= 0:
        side = (flops / 2) ** (1 / 3)
        return side, side, side
    k = max(1.0, flops / (2 * result))
    columns = max(kernels, default=0.0) / k
    if not 1 <= columns <= result:
        columns = result**0.5
    return result / columns, columns, k


def _is_input(graph: OpGraph, value: int) -> bool:
    """Return whether a value is an input of the graph, cast or viewed at most."""
    maker = int(graph.value_producer[value])
    while maker >= 0 and graph.targets[maker].startswith(_CASTS):
        value = int(graph.reads_of(maker)[0])
        maker = int(graph.value_producer[value])
    return maker < 0


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


def _as_arrays(products: list[_Product], attentions: list[tuple[float, ...]]) -> Shapes:
    rows = np.array(products, dtype=np.float64).reshape(-1, len(_Product._fields))
    column = dict(zip(_Product._fields, rows.T, strict=True))
    element, is_convolution = column["element"], column["is_convolution"] > 0
    arrays = Products(column["batch"], column["m"], column["n"], column["k"], element, element)
    of_attentions = np.array(attentions, dtype=np.float64).reshape(-1, 11)
    _, queries, keys, heads, key_heads, size, causal, bytes_each, kept = of_attentions[:, 2:].T
    none = np.zeros(len(of_attentions))
    return Shapes(
        column["op"].astype(np.int64),
        arrays,
        column["calls"].astype(np.int64),
        column["alignment"].astype(np.int64),
        column["has_bias"] > 0,
        is_convolution,
        column["is_gradient"] > 0,
        Convolutions(
            arrays.only(is_convolution),
            (column["layout_elements"] * element)[is_convolution],
            (column["reads_input"] > 0)[is_convolution],
        ),
        of_attentions[:, 0].astype(np.int64),
        Attentions(none + 1, queries, keys, heads, key_heads, size, none, causal, bytes_each, none),
        of_attentions[:, 1].astype(np.int64),
        kept,
    )
