"""Weights and caches of few bits: what they take on a device, and what a step then reads.

Only products with a weight are converted, as libraries convert linear layers and experts; a weight
that anything else reads too, such as an embedding, stays as it is. The product is computed in the
dtype of the graph: a kernel that reads few bits expands them on the chip, so that fewer bytes come
from memory and as many operations are done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray, OpGraph
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "CACHE_DTYPES",
    "WeightFormat",
    "with_cache_dtype",
    "with_chosen_experts",
    "with_few_bits",
    "with_routed_share",
]

CACHE_DTYPES = {"bf16": 2, "fp8": 1}
"""What keys and values may be kept in, and the bytes of a number; ``fp8`` with a scale for each
tensor, as vLLM keeps them, which is not counted."""
_PRODUCTS = ("linear", "mm", "addmm", "bmm", "matmul", "_grouped_mm", "grouped_mm_fallback")
_EXPERTS = ("_grouped_mm", "grouped_mm_fallback")
"""Those of rows, each with the weight of its expert."""
_KEPT = ("_keys", "_values")
"""What the name of an input of a cache ends in that holds keys or values."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a library lays out a matrix of (rows, columns) numbers; a row is an output's."""

    name: str
    bits: int
    """Of a number."""
    group_size: int = 0
    """Neighbours in a row that share a scale; 0 without groups."""
    group_bytes: float = 0.0
    """Beside each group: scales and zero points."""
    row_bytes: float = 0.0
    """Beside each row."""
    column_bytes: float = 0.0
    """Beside each column."""
    matrix_bytes: float = 0.0
    """Beside each matrix."""
    read_share: float = 1.0
    """Share of the rate of a 16-bit kernel at which its kernel reads weights, in (0, 1]."""
    keep: Sequence[str] = ()
    """Names of modules that stay as they are, with all that is in them."""

    def __post_init__(self) -> None:
        """Refuse numbers of bits and sizes that no format has."""
        if self.bits not in (2, 3, 4, 6, 8):
            raise SpecError(f"weights.bits={self.bits} must be 2, 3, 4, 6 or 8")
        if not 0 < self.read_share <= 1:
            raise SpecError(f"weights.read_share={self.read_share} must be above 0, and 1 at most")
        if self.group_size < 0:
            raise SpecError(f"weights.group_size={self.group_size} must be 0, for none, or more")

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix, all scales included.

        Raises:
            SpecError: for groups that do not divide a row.

        """
        if self.group_size and columns % self.group_size:
            raise SpecError(
                f"weights.group_size={self.group_size} does not divide the {columns} columns of a"
                f" weight; choose {_divisors(columns)}"
            )
        groups = rows * columns // self.group_size if self.group_size else 0
        beside = groups * self.group_bytes + rows * self.row_bytes
        return ceil(rows * columns * self.bits / 8 + beside + columns * self.column_bytes) + ceil(
            self.matrix_bytes
        )


def _divisors(columns: int) -> str:
    return " or ".join(str(size) for size in (32, 64, 128) if not columns % size) or "0 for rows"


class _Product(NamedTuple):
    """A product with a weight, of `matrices` (experts, or one) each of (rows, columns)."""

    op: int
    weight: int
    inputs: int
    """Rows of the other operand, of all matrices together."""
    matrices: int
    rows: int
    columns: int


def with_few_bits(graph: OpGraph, layout: WeightFormat) -> OpGraph:
    """Return `graph` with the weights of its products in `layout`.

    Raises:
        SpecError: where none is converted, or groups do not divide a row.

    """
    products = _convertible(graph, layout)
    if not products:
        raise SpecError(
            f"weights={layout.name} converts no weight of this model: nothing multiplies by one"
            f" outside of {', '.join(layout.keep) or 'embeddings'}; set weights=none"
        )
    weight_bytes, moved = graph.weight_bytes.copy(), graph.moved_bytes.copy()
    targets = list(graph.targets)
    laid_out: dict[int, int] = {}
    for product in products:
        before = int(graph.weight_bytes[product.weight])
        if product.weight not in laid_out:  # a backward has the other way round as its rows
            size = layout.bytes_of(product.rows, product.columns)
            laid_out[product.weight] = product.matrices * size
        weight_bytes[product.weight] = after = laid_out[product.weight]
        # Of experts only those are read that a token is sent to.
        share = min(1.0, product.inputs / product.matrices)
        # A slower kernel takes as long as if it read more.
        moved[product.op] -= round(share * before) - round(share * after / layout.read_share)
        targets[product.op] = f"{layout.name}.{_name(graph, product.op)}.default"
    return replace(graph, weight_bytes=weight_bytes, moved_bytes=moved, targets=tuple(targets))


def with_chosen_experts(graph: OpGraph) -> OpGraph:
    """Return `graph` with no more experts read than rows are sent to them.

    A capture with a symbolic batch counts all of them as read: the smaller of two numbers is no
    polynomial of sizes.
    """
    moved = graph.moved_bytes.copy()
    for product in _routed(graph):
        expert_bytes = int(graph.weight_bytes[product.weight]) // product.matrices
        moved[product.op] -= max(0, product.matrices - product.inputs) * expert_bytes
    return replace(graph, moved_bytes=moved)


def with_routed_share(graph: OpGraph, share: float, plain: OpGraph | None = None) -> OpGraph:
    """Return `graph` whose experts multiply `share` of their rows, and skip the others.

    Those are of experts on other devices: room is made for them, and kernels pass over them.
    `plain` is the graph before its weights were laid out in few bits, where they were.
    """
    before = graph if plain is None else plain
    flops, moved = graph.flops.copy(), graph.moved_bytes.copy()
    for op, weight, inputs, matrices, *_ in _routed(before):
        rows, experts = ceil(inputs * share), min(inputs, matrices)
        row_bytes = int(before.moved_bytes[op]) - experts * (
            int(before.weight_bytes[weight]) // matrices
        )
        read_bytes = int(moved[op]) - row_bytes
        flops[op] = flops[op] // inputs * rows
        moved[op] = row_bytes * rows // inputs + read_bytes * min(rows, matrices) // experts
    return replace(graph, flops=flops, moved_bytes=moved)


def _routed(graph: OpGraph) -> list[_Product]:
    """Return the products of rows, each with the weight of its expert."""
    routed = [op for op in range(graph.n_ops) if _name(graph, op) in _EXPERTS]
    behind = _weights_behind(graph) if routed else {}
    products = []
    for op in routed:
        weights = [
            *(behind[v] for v in graph.reads_of(op).tolist() if v in behind),
            *graph.uses_of(op).tolist(),
        ]
        sizes = (_product(graph, op, weight, behind) for weight in weights)
        product = next((product for product in sizes if product is not None), None)
        products += [] if product is None else [product]
    return products


def with_cache_dtype(graph: OpGraph, dtype: str) -> OpGraph:
    """Return `graph` with keys and values kept in `dtype`, one of `CACHE_DTYPES`.

    Other states of a model, such as those of recurrences, stay as they are.

    Raises:
        SpecError: for another dtype, and where no keys and values are kept.

    """
    if dtype not in CACHE_DTYPES:
        raise SpecError(f"kv_cache={dtype} does not exist; {nearest_names(dtype, CACHE_DTYPES)}")
    item_bytes = _graph_item_bytes(graph)
    share = CACHE_DTYPES[dtype] / item_bytes
    if share == 1.0:
        return graph
    kept, room_bytes = _keys_and_values(graph)
    if not kept.any():
        raise SpecError(
            f"kv_cache={dtype} converts nothing of this model, which keeps no keys and values; set"
            " kv_cache=auto"
        )
    less = np.where(kept, graph.value_bytes - (graph.value_bytes * share).astype(np.int64), 0)
    # A view that repeats heads for groups of queries is read once.
    less_read = np.minimum(less, (room_bytes * (1 - share)).astype(np.int64))
    moved = graph.moved_bytes.copy()
    for op in range(graph.n_ops):
        values = graph.reads_of(op)
        written = "index_copy_" in graph.targets[op]
        if moved[op] and kept[values].any() and not written:
            moved[op] = max(0, moved[op] - int(less_read[values].sum()))
    return replace(
        graph,
        moved_bytes=moved,
        value_bytes=graph.value_bytes - less,
        value_alloc_bytes=np.where(
            kept, (graph.value_alloc_bytes * share).astype(np.int64), graph.value_alloc_bytes
        ),
    )


def _keys_and_values(graph: OpGraph) -> tuple[npt.NDArray[np.bool_], IntArray]:
    """Return which values are keys or values of a cache, and the bytes of the whole tensor of each.

    A step reads what the write into the cache returns, or a view of that, not the input itself.
    """
    kept = graph.value_is_cache & [name.endswith(_KEPT) for name in graph.value_names]
    room_bytes = np.where(kept, graph.value_alloc_bytes, 0)
    for value in np.flatnonzero(graph.value_base >= 0).tolist():
        base = graph.value_base[value]
        kept[value], room_bytes[value] = kept[base], room_bytes[base]
    return kept, room_bytes


def _graph_item_bytes(graph: OpGraph) -> int:
    """Return the bytes of a number of the weights: those of the dtype of most operators."""
    sizes = [_ITEM_BYTES[dtype] for dtype in graph.dtypes if dtype in _ITEM_BYTES]
    return max(set(sizes), key=sizes.count, default=4)


def _name(graph: OpGraph, op: int) -> str:
    parts = graph.targets[op].split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]


def _convertible(graph: OpGraph, layout: WeightFormat) -> list[_Product]:
    """Return the products whose weights are converted: all that read these are products."""
    behind = _weights_behind(graph)
    made = np.bincount(
        graph.value_producer[graph.value_producer >= 0],
        weights=graph.value_alloc_bytes[graph.value_producer >= 0],
        minlength=graph.n_ops,
    )
    products: dict[int, list[_Product]] = {}
    refused = set(graph.gradient_weights.tolist())  # what is trained stays as it is
    for op in range(graph.n_ops):
        direct = graph.uses_of(op).tolist()
        read = graph.reads_of(op).tolist()
        # A transposed weight before the bias beside it, which may have as many numbers.
        weights = dict.fromkeys([*(behind[v] for v in read if v in behind), *direct])
        if not weights or (not made[op] and not graph.moved_bytes[op]):
            continue  # a view of a weight, or none
        is_kept = set(graph.modules[op].split(".")) & set(layout.keep)
        sizes = [] if is_kept else [_product(graph, op, weight, behind) for weight in weights]
        product = next((product for product in sizes if product is not None), None)
        if product is not None:
            products.setdefault(product.weight, []).append(product)
        refused.update(weight for weight in weights if product is None or weight != product.weight)
    return [p for weight, each in products.items() if weight not in refused for p in each]


def _weights_behind(graph: OpGraph) -> dict[int, int]:
    """Return the weight that each value is a view of, by value."""
    behind: dict[int, int] = {}
    own = np.flatnonzero(
        (graph.value_producer >= 0) & (graph.value_alloc_bytes == 0) & (graph.value_base < 0)
    )
    for value in own.tolist():
        op = int(graph.value_producer[value])
        if graph.moved_bytes[op]:
            continue
        used = [
            *graph.uses_of(op).tolist(),
            *(behind[v] for v in graph.reads_of(op) if v in behind),
        ]
        if len(used) == 1:
            behind[value] = used[0]
    for value in np.flatnonzero(graph.value_base >= 0).tolist():
        base = int(graph.value_base[value])
        if base in behind:
            behind[value] = behind[base]
    return behind


def _product(graph: OpGraph, op: int, weight: int, behind: dict[int, int]) -> _Product | None:
    """Return the sizes of a product with `weight`; None for anything else.

    Of R rows of C numbers that become R rows of N, the products are R N C: so the elements of the
    operands and the FLOPs say all three. A bias, and other vectors, are no product's weight.
    """
    if _name(graph, op) not in _PRODUCTS or not graph.flops[op]:
        return None
    item_bytes = _ITEM_BYTES.get(graph.dtypes[op])
    others = [v for v in graph.reads_of(op).tolist() if v not in behind]
    results = np.flatnonzero(graph.value_producer == op)
    if item_bytes is None or not others or not len(results):
        return None
    read = int(graph.value_bytes[others[0]]) // item_bytes
    result = int(graph.value_bytes[results[0]]) // item_bytes
    products = int(graph.flops[op]) // 2
    inputs = read * result // products
    if not inputs or read % inputs or result % inputs:
        return None
    columns, rows = read // inputs, result // inputs
    elements = int(graph.weight_bytes[weight]) // item_bytes
    if elements % (rows * columns):
        return None
    return _Product(op, weight, inputs, elements // (rows * columns), rows, columns)
