"""How long a checkpointed block holds what came into it: until its backward ends.

`torch.utils.checkpoint` keeps what a block was given, to compute it again from, as long as a
formula of the block's backward is to come that saved something.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.graph import OpGraph, csr

__all__ = ["held_by_blocks"]


def held_by_blocks(
    graph: OpGraph, again: Sequence[int | None], saving: Sequence[int | None]
) -> OpGraph:
    """Return `graph` with what blocks are computed again from read by formulas of their backward.

    Nothing is transferred that was not: what an operator reads to be computed again is held for the
    last formula of its own group, the one that computes its gradient. What comes into a block is
    held to its end so where an operator reads it that saves something for its gradient.

    Args:
        graph: of a training step.
        again: for each operator that is computed again the number of the run through a block that
            it belongs to; None for all others.
        saving: for each operator of a formula that saved something of such a run the number of the
            run; None for all others.

    """
    group = graph.group.tolist()
    last = {(number, group[op]): op for op, number in enumerate(saving) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    producer = graph.value_producer.tolist()
    held: dict[int, list[int]] = {}
    for op, number in enumerate(again):
        end = None if number is None else last.get((number, group[op]))
        if end is not None:
            outside = [v for v in rows[op] if producer[v] < 0 or again[producer[v]] != number]
            held.setdefault(end, []).extend(outside)
    for op, values in held.items():
        rows[op] = list(dict.fromkeys([*rows[op], *values]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))
