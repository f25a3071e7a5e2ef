"""Orders of the operators that are worth cutting into runs."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import FloatArray, IntArray
from fxpart.static.tables import Tables

__all__ = ["depth_first", "orders"]


@compiled
def depth_first(tables: Tables) -> IntArray:
    """Return the operators so that each comes soon after what it reads. Shape (n,).

    A topological order: of the operators whose reads are all done, the newest comes next.
    """
    n = tables.total.shape[0]
    waits = tables.read_start[1:] - tables.read_start[:-1]
    stack, depth = np.empty(n, dtype=np.int64), 0
    for op in range(n - 1, -1, -1):
        if waits[op] == 0:
            stack[depth] = op
            depth += 1
    order = np.empty(n, dtype=np.int64)
    for position in range(n):
        depth -= 1
        op = stack[depth]
        order[position] = op
        for i in range(tables.reader_start[op + 1] - 1, tables.reader_start[op] - 1, -1):
            reader = tables.readers[i]
            waits[reader] -= 1
            if waits[reader] == 0:
                stack[depth] = reader
                depth += 1
    return order


def orders(tables: Tables, head: FloatArray, tail: FloatArray) -> list[IntArray]:
    """Return the graph order, one that is depth first, and by earliest end and least slack.

    Args:
        tables: the operators.
        head: longest path that ends with each operator, without transfers. Shape (n,).
        tail: longest path that begins after each operator. Shape (n,).

    """
    n = len(head)
    by_end = np.argsort(head, kind="stable").astype(np.int64)
    by_slack = np.argsort(-(head + tail), kind="stable").astype(np.int64)
    return [np.arange(n, dtype=np.int64), depth_first(tables), by_end, by_slack]
