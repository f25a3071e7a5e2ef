"""Fused accumulation of gradients in float32, as in Megatron-LM.

The product that computes a weight's gradient adds it to a buffer (``main_grad``), so the gradient
itself is never materialized, except briefly for the embedding and the head, which use other
kernels. Transformer Engine still returns a tensor for each shape of a weight, which it keeps.
"""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.optimizer import ITEMSIZE, STATE_DTYPES
from fxpart.core.temporaries import with_temporaries
from fxpart.core.weight_state import with_state
from fxpart.errors import SpecError

__all__ = ["kept_gradient_bytes", "with_main_gradients"]

_MAIN_ITEMSIZE = 4


def with_main_gradients(graph: OpGraph) -> tuple[OpGraph, IntArray]:
    """Accumulate the gradients of a step without updates into buffers of its weights.

    Returns:
        The step, and the new index of each of its former values, shape (V,).

    Raises:
        SpecError: if no operator produces a gradient, or its dtype is not a real one.

    """
    gradients = graph.gradient_values
    makers = graph.value_producer[gradients]
    if (makers < 0).any():
        raise SpecError(
            "a gradient is an input of the graph, but engine=megatron needs gradients that "
            "operators compute; capture a training step with phase=training"
        )
    dtypes = [graph.dtypes[op] for op in makers.tolist()]
    odd = next((dtype for dtype in dtypes if dtype not in STATE_DTYPES), None)
    if odd is not None:
        raise SpecError(f"engine=megatron accumulates real-valued gradients, but one is {odd}")
    itemsize = np.array([ITEMSIZE[dtype] for dtype in dtypes], dtype=np.int64)
    main_bytes = graph.value_bytes[gradients] // itemsize * _MAIN_ITEMSIZE
    graph = with_state(graph, graph.gradient_weights, [main_bytes])
    roots = _roots(graph, gradients)
    names = [graph.weight_names[weight] for weight in graph.gradient_weights.tolist()]
    is_outside_blocks = np.array([not block_of(name) for name in names], dtype=np.bool_)
    sizes = graph.value_alloc_bytes.copy()
    temporary_bytes = sizes[roots[is_outside_blocks]]
    sizes[roots] = 0
    whole = replace(graph, value_alloc_bytes=sizes)
    return with_temporaries(whole, graph.value_producer[roots[is_outside_blocks]], temporary_bytes)


def _roots(graph: OpGraph, values: IntArray) -> IntArray:
    """Return the value that owns the storage of each of `values`."""
    roots = values.copy()
    while (graph.value_base[roots] >= 0).any():
        roots = np.where(graph.value_base[roots] >= 0, graph.value_base[roots], roots)
    return roots


def kept_gradient_bytes(graph: OpGraph, device_of: IntArray, device: int) -> int:
    """Return the bytes of gradients kept by Transformer Engine: one per weight shape on `device`.

    Weights within a block differ in shape and blocks are alike, so this is the total of the largest
    block. Stacked experts count as a single one.
    """
    expert_counts = _experts(graph)
    makers = graph.value_producer[graph.gradient_values]
    blocks: dict[str, int] = {}
    for weight, maker in zip(graph.gradient_weights.tolist(), makers.tolist(), strict=True):
        block = block_of(graph.weight_names[weight])
        if block and device_of[maker] == device:
            count = expert_counts.get(graph.weight_names[weight].rpartition(".")[0], 1)
            blocks[block] = blocks.get(block, 0) + int(graph.weight_bytes[weight]) // count
    return max(blocks.values(), default=0)


def _experts(graph: OpGraph) -> dict[str, int]:
    """Return the number of experts of each module with grouped products."""
    counts = {}
    for op, target in enumerate(graph.targets):
        if "grouped_mm" in target and not graph.is_backward[op]:
            # The group ends, an int32 each, are its smallest operand.
            ends_bytes = int(graph.value_bytes[graph.reads_of(op)].min())
            counts[graph.modules[op]] = max(1, ends_bytes // 4)
    return counts
