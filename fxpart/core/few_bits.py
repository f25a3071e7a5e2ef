"""Quantized weights and KV caches: their memory, and the bytes that a step then reads.

Only matrix products with a weight are converted, as libraries convert linear layers and experts; a
weight with any other reader, such as a tied embedding, is left alone. Products are still computed
in the dtype of the graph, unless their inputs are quantized too: kernels dequantize on chip, so
fewer bytes come from memory but the FLOPs are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.core.temporaries import TEMPORARY, with_temporaries
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "CACHE_DTYPES",
    "WeightFormat",
    "cache_share",
    "check_activations",
    "dequantized_bytes",
    "graph_item_bytes",
    "is_routed",
    "keys_and_values",
    "quantized_inputs",
    "with_cache_dtype",
    "with_chosen_experts",
    "with_few_bits",
    "with_few_bits_at_any_size",
    "with_routed_share",
]

CACHE_DTYPES = {"bf16": 2, "fp8": 1, "int8": 1}
"""Dtypes of cached keys and values, with bytes per element. ``fp8`` as in vLLM and ``int8`` as in
TensorRT-LLM have one scale per tensor, which is not counted."""
_PRODUCTS = ("linear", "mm", "addmm", "bmm", "matmul", "_grouped_mm", "grouped_mm_fallback")
_EXPERTS = ("_grouped_mm", "grouped_mm_fallback")
"""Products of rows, each with the weight of its expert."""
_KEPT = ("_keys", "_values")
"""Name suffixes of cache inputs that hold keys or values."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a library stores a quantized matrix of (rows, columns); a row belongs to an output."""

    name: str
    bits: int
    """Bits per element."""
    group_size: int = 0
    """Consecutive elements of a row that share a scale; 0 without groups."""
    pads_groups: bool = False
    """Whether the last group of a row is filled up, such as that of a tensor-parallel shard."""
    group_bytes: float = 0.0
    """Overhead per group: scales and zero points."""
    row_bytes: float = 0.0
    """Overhead per row."""
    column_bytes: float = 0.0
    """Overhead per column."""
    matrix_bytes: float = 0.0
    """Overhead per matrix."""
    read_share: float = 1.0
    """Rate at which its kernels read weights, as a fraction of a 16-bit kernel's, in (0, 1]."""
    fused_rows: int | None = None
    """Most rows of an input that its kernel multiplies by quantized weights. More rows are
    multiplied by a dequantized copy, which is written first. None for any number."""
    keep: Sequence[str] = ()
    """Names of modules that are left unquantized, including everything inside them."""
    activations: str | None = None
    """Dtype to which the inputs of its products are cast: ``fp8`` or, for the model's, None."""

    def __post_init__(self) -> None:
        """Check the number of bits, the read share, the group size, the rows and activations."""
        if self.activations is not None:
            check_activations(self.name, self.activations)
        if self.bits not in (2, 3, 4, 6, 8):
            raise SpecError(f"weights.bits={self.bits} must be 2, 3, 4, 6 or 8")
        if not 0 < self.read_share <= 1:
            raise SpecError(f"weights.read_share={self.read_share} must be above 0, and 1 at most")
        if self.pads_groups and not self.group_size:
            raise SpecError("weights.pads_groups=true fills up groups; set weights.group_size")
        if self.group_size < 0:
            raise SpecError(f"weights.group_size={self.group_size} must be 0, for none, or more")
        if self.fused_rows is not None and self.fused_rows < 0:
            raise SpecError(f"weights.fused_rows={self.fused_rows} must be 0 or more, or null")

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix, including all scales.

        Raises:
            SpecError: if the group size does not divide a row, and groups are not filled up.

        """
        if self.pads_groups:
            columns += -columns % self.group_size
        if self.group_size and columns % self.group_size:
            raise SpecError(
                f"weights.group_size={self.group_size} does not divide the {columns} columns of a"
                f" weight; choose {_divisors(columns)}"
            )
        groups = rows * columns // self.group_size if self.group_size else 0
        overhead = groups * self.group_bytes + rows * self.row_bytes
        return ceil(rows * columns * self.bits / 8 + overhead + columns * self.column_bytes) + ceil(
            self.matrix_bytes
        )


def check_activations(weights: str, activations: str) -> None:
    """Raise `SpecError` if no kernel multiplies inputs in `activations` by these weights."""
    if (weights, activations) != ("fp8", "fp8"):
        raise SpecError(
            f"weights.activations={activations} does not go with weights={weights};"
            " weights=fp8 has weights.activations=fp8, or null"
        )


def _divisors(columns: int) -> str:
    return " or ".join(str(size) for size in (32, 64, 128) if not columns % size) or "0 for rows"


class _Product(NamedTuple):
    """A product with a weight of `matrices` matrices (experts, or one) of (rows, columns) each."""

    op: int
    weight: int
    inputs: int
    """Rows of the other operand, summed over all matrices."""
    matrices: int
    rows: int
    columns: int


def with_few_bits(graph: OpGraph, layout: WeightFormat) -> OpGraph:
    """Return `graph` with the weights of its products stored in `layout`.

    A dequantized copy is a temporary of its product.

    Raises:
        SpecError: if no weight can be converted, or groups do not divide a row.

    """
    products = _convertible(graph, layout)
    if not products:
        raise SpecError(
            f"weights={layout.name} quantizes no weight of this model: no matrix product reads one "
            f"outside of {', '.join(layout.keep) or 'embeddings'}; set weights=none"
        )
    weight_bytes, moved = graph.weight_bytes.copy(), graph.moved_bytes.copy()
    targets = list(graph.targets)
    copies: dict[int, int] = {}
    laid_out: dict[int, int] = {}
    for product in products:
        plain_bytes = int(graph.weight_bytes[product.weight])
        if product.weight not in laid_out:  # rows and columns swap in the backward
            size = layout.bytes_of(product.rows, product.columns)
            laid_out[product.weight] = product.matrices * size
        weight_bytes[product.weight] = quantized_bytes = laid_out[product.weight]
        # Only experts that receive a token are read.
        share = min(1.0, product.inputs / product.matrices)
        # A slower kernel is modelled as one that reads more.
        moved[product.op] += round(share * quantized_bytes / layout.read_share)
        if layout.fused_rows is None or product.inputs <= layout.fused_rows:
            moved[product.op] -= round(share * plain_bytes)
        else:  # the copy is written, and read in place of the weights
            moved[product.op] += round(share * plain_bytes)
            copies[product.op] = round(share * plain_bytes)
        targets[product.op] = f"{layout.name}.{_name(graph, product.op)}.default"
    graph = replace(graph, weight_bytes=weight_bytes, moved_bytes=moved, targets=tuple(targets))
    if not copies:
        return graph
    makers, sizes = (np.array(x, dtype=np.int64) for x in (list(copies), list(copies.values())))
    return with_temporaries(graph, makers, sizes)[0]


def dequantized_bytes(graph: OpGraph, layout: WeightFormat) -> dict[int, int]:
    """Return the bytes read and written by each product to dequantize its weights into a copy.

    `graph` is one of `with_few_bits`, whose `OpGraph.moved_bytes` include them. The overhead per
    row, column and matrix is left out.
    """
    group_bytes = layout.group_bytes / layout.group_size if layout.group_size else 0.0
    element_bytes = (layout.bits / 8 + group_bytes) / layout.read_share
    prefix, moved = f"{layout.name}.", {}
    for value, name in enumerate(graph.value_names):
        op = int(graph.value_producer[value])
        if name.endswith(TEMPORARY) and graph.targets[op].startswith(prefix):
            copy_bytes = int(graph.value_alloc_bytes[value])
            elements = copy_bytes // _ITEM_BYTES[graph.dtypes[op]]
            moved[op] = copy_bytes + round(elements * element_bytes)
    return moved


def quantized_inputs(graph: OpGraph, layout: WeightFormat) -> dict[int, int]:
    """Return the value that each product in `graph`, of `with_few_bits`, multiplies by a weight."""
    behind, prefix = _weights_behind(graph), f"{layout.name}."
    return {
        op: next(value for value in graph.reads_of(op).tolist() if value not in behind)
        for op, target in enumerate(graph.targets)
        if target.startswith(prefix)
    }


def with_few_bits_at_any_size(
    symbolic: SymbolicGraph, layout: WeightFormat
) -> SymbolicGraph | None:
    """Return `symbolic` with the weights of its products stored in `layout`, as `with_few_bits`.

    None where what is read depends on the sizes: for a mixture of experts, and for formats with a
    number of `fused_rows`.

    Raises:
        SpecError: as `with_few_bits`.

    """
    graph = symbolic.graph
    constant = np.flatnonzero(~symbolic.exponents.any(axis=1))
    if layout.fused_rows is not None or not len(constant):
        return None
    if any(p.matrices > 1 for p in _convertible(graph, layout)):
        return None
    converted = with_few_bits(graph, layout)
    moved = symbolic.coefficients["moved_bytes"].copy()
    moved[:, constant[0]] += converted.moved_bytes - graph.moved_bytes
    coefficients = {**symbolic.coefficients, "moved_bytes": moved}
    return replace(symbolic, graph=converted, coefficients=coefficients)


def with_chosen_experts(graph: OpGraph) -> OpGraph:
    """Return `graph` with no more experts read than there are routed rows.

    A capture with a symbolic batch counts all experts as read, since a minimum is not a polynomial
    of the sizes.
    """
    moved = graph.moved_bytes.copy()
    for product in _routed(graph):
        expert_bytes = int(graph.weight_bytes[product.weight]) // product.matrices
        moved[product.op] -= max(0, product.matrices - product.inputs) * expert_bytes
    return replace(graph, moved_bytes=moved)


def with_routed_share(graph: OpGraph, share: float, plain: OpGraph | None = None) -> OpGraph:
    """Return `graph` with experts that multiply only a `share` of their rows.

    The other rows belong to experts on other devices: memory is allocated for them, but kernels
    skip them. `plain` is the graph before quantization, if it was quantized.
    """
    unquantized = graph if plain is None else plain
    flops, moved = graph.flops.copy(), graph.moved_bytes.copy()
    for op, weight, inputs, matrices, *_ in _routed(unquantized):
        rows, experts = ceil(inputs * share), min(inputs, matrices)
        row_bytes = int(unquantized.moved_bytes[op]) - experts * (
            int(unquantized.weight_bytes[weight]) // matrices
        )
        read_bytes = int(moved[op]) - row_bytes
        flops[op] = flops[op] // inputs * rows
        moved[op] = row_bytes * rows // inputs + read_bytes * min(rows, matrices) // experts
    return replace(graph, flops=flops, moved_bytes=moved)


def is_routed(graph: OpGraph, op: int) -> bool:
    """Return whether an operator multiplies each row by the weight of its expert."""
    return _name(graph, op) in _EXPERTS


def _routed(graph: OpGraph) -> list[_Product]:
    """Return the products whose rows are each multiplied by the weight of one expert."""
    routed = [op for op in range(graph.n_ops) if is_routed(graph, op)]
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
    """Return `graph` with keys and values cached in `dtype`, one of `CACHE_DTYPES`.

    Other cached state, such as that of recurrences, is left alone.

    Raises:
        SpecError: if `dtype` is unknown, or the model caches no keys and values.

    """
    share = cache_share(graph, dtype)
    if share == 1.0:
        return graph
    is_key_value, tensor_bytes = keys_and_values(graph)
    if not is_key_value.any():
        raise SpecError(
            f"kv_cache={dtype} converts nothing in this model, which caches no keys and values; "
            "set kv_cache=auto"
        )
    saved_bytes = np.where(
        is_key_value, graph.value_bytes - (graph.value_bytes * share).astype(np.int64), 0
    )
    # A view that repeats heads for grouped queries is read once.
    unread_bytes = np.minimum(saved_bytes, (tensor_bytes * (1 - share)).astype(np.int64))
    moved = graph.moved_bytes.copy()
    for op in range(graph.n_ops):
        values = graph.reads_of(op)
        is_write = "index_copy_" in graph.targets[op]
        if moved[op] and is_key_value[values].any() and not is_write:
            moved[op] = max(0, moved[op] - int(unread_bytes[values].sum()))
    return replace(
        graph,
        moved_bytes=moved,
        value_bytes=graph.value_bytes - saved_bytes,
        value_alloc_bytes=np.where(
            is_key_value,
            (graph.value_alloc_bytes * share).astype(np.int64),
            graph.value_alloc_bytes,
        ),
    )


def cache_share(graph: OpGraph, dtype: str) -> float:
    """Return the bytes of a cached key or value as a share of those of the model's dtype.

    Raises:
        SpecError: if `dtype` is not one of `CACHE_DTYPES`.

    """
    if dtype not in CACHE_DTYPES:
        raise SpecError(f"kv_cache={dtype} does not exist; {nearest_names(dtype, CACHE_DTYPES)}")
    return CACHE_DTYPES[dtype] / graph_item_bytes(graph)


def keys_and_values(graph: OpGraph) -> tuple[npt.NDArray[np.bool_], IntArray]:
    """Return a mask of cached keys and values, and the bytes of the whole tensor of each.

    A step reads the result of the write into the cache, or a view of it, not the input itself.
    """
    is_key_value = graph.value_is_cache & [name.endswith(_KEPT) for name in graph.value_names]
    tensor_bytes = np.where(is_key_value, graph.value_alloc_bytes, 0)
    for value in np.flatnonzero(graph.value_base >= 0).tolist():
        base = graph.value_base[value]
        is_key_value[value], tensor_bytes[value] = is_key_value[base], tensor_bytes[base]
    return is_key_value, tensor_bytes


def graph_item_bytes(graph: OpGraph) -> int:
    """Return the bytes per element of the dtype that most operators compute in."""
    sizes = [_ITEM_BYTES[dtype] for dtype in graph.dtypes if dtype in _ITEM_BYTES]
    return max(set(sizes), key=sizes.count, default=4)


def _name(graph: OpGraph, op: int) -> str:
    parts = graph.targets[op].split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]


def _convertible(graph: OpGraph, layout: WeightFormat) -> list[_Product]:
    """Return the products whose weights can be converted: those read by products only."""
    behind = _weights_behind(graph)
    produced_bytes = np.bincount(
        graph.value_producer[graph.value_producer >= 0],
        weights=graph.value_alloc_bytes[graph.value_producer >= 0],
        minlength=graph.n_ops,
    )
    products: dict[int, list[_Product]] = {}
    refused = set(graph.gradient_weights.tolist())  # trained weights are not quantized
    is_view = np.zeros(graph.n_values, dtype=np.bool_)
    is_view[list(behind)] = True
    for op in np.union1d(graph.users, graph.readers[is_view[graph.reads]]).tolist():
        direct = graph.uses_of(op).tolist()
        read = graph.reads_of(op).tolist()
        # Transposed weights come before the bias, which may have as many elements.
        weights = dict.fromkeys([*(behind[v] for v in read if v in behind), *direct])
        if not produced_bytes[op] and not graph.moved_bytes[op]:
            continue  # a view of a weight
        is_excluded = set(graph.modules[op].split(".")) & set(layout.keep)
        sizes = [] if is_excluded else [_product(graph, op, weight, behind) for weight in weights]
        product = next((product for product in sizes if product is not None), None)
        if product is not None:
            products.setdefault(product.weight, []).append(product)
        refused.update(weight for weight in weights if product is None or weight != product.weight)
    return [
        p
        for weight, weight_products in products.items()
        if weight not in refused
        for p in weight_products
    ]


def _weights_behind(graph: OpGraph) -> dict[int, int]:
    """Return the weight that each view of a weight refers to, by value."""
    behind: dict[int, int] = {}
    own_views = np.flatnonzero(
        (graph.value_producer >= 0) & (graph.value_alloc_bytes == 0) & (graph.value_base < 0)
    )
    for value in own_views.tolist():
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
    """Return the product of `op` with `weight`, or None if it is not one.

    A product of R rows of C elements into R rows of N has R N C multiplications, so the element
    counts of the operands and the FLOPs determine all three. Biases and other vectors are not a
    product's weight.
    """
    if _name(graph, op) not in _PRODUCTS or not graph.flops[op]:
        return None
    item_bytes = _ITEM_BYTES.get(graph.dtypes[op])
    others = [v for v in graph.reads_of(op).tolist() if v not in behind]
    result = int(np.searchsorted(graph.value_producer, op))  # the first value that `op` makes
    makes_none = result == graph.n_values or graph.value_producer[result] != op
    if item_bytes is None or not others or makes_none:
        return None
    read_elements = int(graph.value_bytes[others[0]]) // item_bytes
    result_elements = int(graph.value_bytes[result]) // item_bytes
    multiplications = int(graph.flops[op]) // 2
    inputs = read_elements * result_elements // multiplications
    if not inputs or read_elements % inputs or result_elements % inputs:
        return None
    columns, rows = read_elements // inputs, result_elements // inputs
    elements = int(graph.weight_bytes[weight]) // item_bytes
    if elements % (rows * columns):
        return None
    return _Product(op, weight, inputs, elements // (rows * columns), rows, columns)
