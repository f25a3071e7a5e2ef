"""What the updates of one stage's weights allocate at the end of a step."""

import numpy as np

from fxpart.graph import IntArray, OpGraph
from fxpart.schedule.stage_storages import peak_of_intervals

__all__ = ["update_bytes"]


def update_bytes(graph: OpGraph, stage_of: IntArray, stage: int) -> tuple[int, int]:
    """Return the most bytes at once that the updates of a stage make, and those that stay.

    What stays is there until all updates of the device are done. Weights, their gradients and the
    optimizer's state are not counted.

    Args:
        graph: a step of n operators.
        stage_of: stage of each operator. Length n.
        stage: the one that is asked about.

    """
    mine = np.flatnonzero(graph.is_update & (stage_of == stage))
    if not len(mine):
        return 0, 0
    values = np.flatnonzero(np.isin(graph.value_producer, mine))
    last = graph.value_producer.copy()
    np.maximum.at(last, graph.reads, graph.readers)
    last[graph.value_is_output] = graph.n_ops - 1
    birth, last, size = graph.value_producer[values], last[values], graph.value_alloc_bytes[values]
    stays = int(size[graph.value_is_output[values]].sum())
    return peak_of_intervals(birth, last, size, graph.n_ops), stays
