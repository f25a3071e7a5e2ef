"""Gradients of a weight that several stages use: which values are a stage's part of one."""

import numpy as np
import numpy.typing as npt

from fxpart.graph import IntArray, OpGraph

__all__ = ["tied_parts"]


def tied_parts(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return, for each value, whether it is one stage's part of a weight's gradient. Length V.

    In the graph of a training step a weight has one gradient: the parts of all stages that use it
    are added up where the last one is made. A part is what a backward makes and another stage reads
    there, with as many bytes as a weight that both of them use forward.
    """
    readers, maker = graph.readers, graph.value_producer[graph.reads]
    # Where the maker belongs to the backward, so does the reader.
    away = (maker >= graph.first_backward) & (stage_of[maker] != stage_of[readers])
    is_part = np.zeros(graph.n_values, dtype=np.bool_)
    if not away.any():
        return is_part
    weights = _weights_of_stages(graph, stage_of)
    for edge in np.flatnonzero(away).tolist():
        value = int(graph.reads[edge])
        both = weights[stage_of[maker[edge]]] & weights[stage_of[readers[edge]]]
        is_part[value] |= bool((graph.weight_bytes[both] == graph.value_bytes[value]).any())
    return is_part


def _weights_of_stages(graph: OpGraph, stage_of: IntArray) -> npt.NDArray[np.bool_]:
    """Return which weights each stage uses forward, by stage and weight."""
    users = graph.users
    forward = users < graph.first_backward
    shape = (int(stage_of.max()) + 1, len(graph.weight_bytes))
    used = np.zeros(shape, dtype=np.bool_)
    used[stage_of[users[forward]], graph.uses[forward]] = True
    return used
