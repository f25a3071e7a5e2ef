"""Memory that an operator allocates and frees while it runs."""

from dataclasses import replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["TEMPORARY", "with_temporaries"]

TEMPORARY = ".temporary"
"""End of the names of temporaries, which follows the name of their operator."""


def with_temporaries(graph: OpGraph, makers: IntArray, sizes: IntArray) -> tuple[OpGraph, IntArray]:
    """Return `graph` with temporaries, values without readers, of `sizes` for operators `makers`.

    Returns:
        The graph, and the new index of each of its former values, shape (V,).

    """
    count, n = len(makers), graph.n_values
    # Values are ordered by their producer.
    order = np.argsort(np.concatenate([graph.value_producer, makers]), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    old, none = number[:n], np.full(count, -1)
    base = np.where(graph.value_base >= 0, old[graph.value_base], -1)
    names = (*graph.value_names, *(f"{graph.names[op]}{TEMPORARY}" for op in makers.tolist()))
    value_held = graph.value_held
    if len(value_held):
        value_held = np.concatenate([value_held, none])[order]
    zeros = np.zeros(count, dtype=np.int64)
    whole = replace(
        graph,
        value_names=tuple(names[i] for i in order.tolist()),
        value_producer=np.concatenate([graph.value_producer, makers])[order],
        value_bytes=np.concatenate([graph.value_bytes, sizes])[order],
        value_alloc_bytes=np.concatenate([graph.value_alloc_bytes, sizes])[order],
        value_base=np.concatenate([base, none])[order],
        value_is_output=np.concatenate([graph.value_is_output, zeros.astype(np.bool_)])[order],
        reads=old[graph.reads],
        gradient_values=old[graph.gradient_values],
        value_held=value_held,
    )
    return whole, old
