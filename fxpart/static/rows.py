"""CSR rows: what belongs together side by side, with the place where each group starts."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.graph import IntArray

__all__ = ["distinct_rows", "grouped", "turned"]


@compiled
def grouped(keys: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the places of each key from 0 to `count` - 1 as CSR rows, ascending. O(length)."""
    start = np.zeros(count + 1, dtype=np.int64)
    for place in range(keys.shape[0]):
        start[keys[place] + 1] += 1
    for key in range(count):
        start[key + 1] += start[key]
    places, free = np.empty(keys.shape[0], dtype=np.int64), start[:-1].copy()
    for place in range(keys.shape[0]):
        places[free[keys[place]]] = place
        free[keys[place]] += 1
    return start, places


@compiled
def turned(start: IntArray, items: IntArray, count: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return CSR rows by item: the rows that had it, and the places where it stood.

    Args:
        start: CSR starts into `items`.
        items: numbers from 0 to `count` - 1.
        count: number of rows that come back.

    """
    turned_start, places = grouped(items, count)
    row_of = np.empty_like(items)
    for row in range(start.shape[0] - 1):
        row_of[start[row] : start[row + 1]] = row
    return turned_start, row_of[places], places


def distinct_rows(row: IntArray, item: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the distinct (row, item) pairs as CSR rows, `count` of them; items ascending."""
    pairs = np.unique(np.stack([row, item], axis=1), axis=0)
    return grouped(np.ascontiguousarray(pairs[:, 0]), count)[0], np.ascontiguousarray(pairs[:, 1])
