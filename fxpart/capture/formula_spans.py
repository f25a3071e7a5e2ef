"""What a backward formula of autograd holds: all that it was given, until it ends.

Autograd computes the gradient of one call by one formula, which may be several operators. The
tensors that the forward saved for it are let go, and the gradients that came in are dropped, when
the whole formula is done; not each after the last operator that reads it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.graph import OpGraph, csr

__all__ = ["held_to_the_end"]


def held_to_the_end(graph: OpGraph, formula: Sequence[int | None]) -> OpGraph:
    """Return `graph` with all that a formula takes read by the last operator of the formula too.

    What the formula makes itself is dropped after its last reader, as its own variables are.
    Nothing is transferred that was not: operators of one formula must be of one group.

    Args:
        graph: of a training step.
        formula: for each operator the number of its formula; None for those of none.

    """
    last = {number: op for op, number in enumerate(formula) if number is not None}
    rows = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    held: dict[int, dict[int, None]] = {number: {} for number in last}
    producer = graph.value_producer.tolist()
    for op, number in enumerate(formula):
        if number is None:
            continue
        for value in rows[op]:
            maker = producer[value]
            if maker < 0 or formula[maker] != number:
                held[number][value] = None
    for number, op in last.items():
        rows[op] = list(dict.fromkeys([*rows[op], *held[number]]))
    start, reads = csr(rows)
    return replace(graph, read_start=start, reads=reads.astype(np.int64))
