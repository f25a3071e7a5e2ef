"""Embedding tables packed onto equal devices: the fewest devices, then the shortest computing.

Tables are taken largest first. A device is tried with one more table only where the least bytes
that it could need are within its memory, so that almost every walk over the model is of a device
that takes the table.
"""

import numpy as np

from fxpart.graph import FloatArray
from fxpart.modes.table_sizes import TableSizes

__all__ = ["packed_by_search", "packed_tightly", "spread_by_time"]

Bins = list[tuple[int, ...]]
"""Tables of each device."""

_MOST_STEPS = 20_000
"""Partial packings that the search looks at: enough to try all of eight tables."""


def packed_tightly(sizes: TableSizes, order: list[int], capacity_bytes: int) -> Bins:
    """Return tables packed by best fit decreasing: each on the fullest device that takes it.

    A new device where none does, so there may be more than there are. Each table alone must fit.
    O(tables x devices), and about one walk over the model for each table.
    """
    bins: Bins = []
    held = np.zeros(0, dtype=np.int64)
    for unit in order:
        added = int(sizes.unit_bytes[unit])
        room = np.flatnonzero(sizes.least_bytes + held + added <= capacity_bytes)
        # A stable sort: of equally full devices, the first.
        for index in room[np.argsort(-held[room], kind="stable")].tolist():
            trial = (*bins[index], unit)
            if sizes.needed_bytes(trial) <= capacity_bytes:
                bins[index] = trial
                held[index] += added
                break
        else:
            bins.append((unit,))
            held = np.append(held, added)
    return bins


def packed_by_search(
    sizes: TableSizes, order: list[int], capacity_bytes: int, most_bins: int
) -> Bins | None:
    """Return the first packing on at most `most_bins` devices, trying all; None if none is found.

    Up to eight tables, None means that there is none; of more, that some thousand are none.
    """
    # A stack of partial packings, each with what its devices need at least.
    stack: list[tuple[Bins, list[int]]] = [([], [])]
    for _ in range(_MOST_STEPS):
        if not stack:
            return None
        bins, held = stack.pop()
        place = sum(map(len, bins))
        if place == len(order):
            if all(sizes.needed_bytes(tables) <= capacity_bytes for tables in bins):
                return bins
            continue
        unit = order[place]
        added = int(sizes.unit_bytes[unit])
        # Devices are alike: of the empty ones, one is enough. What is pushed last is tried first.
        if len(bins) < most_bins:
            stack.append(([*bins, (unit,)], [*held, added]))
        for index in sorted(range(len(bins)), key=lambda i: (held[i], -i)):
            if sizes.least_bytes + held[index] + added <= capacity_bytes:
                trial, bytes_held = list(bins), list(held)
                trial[index] = (*bins[index], unit)
                bytes_held[index] += added
                stack.append((trial, bytes_held))
    return None


def spread_by_time(
    sizes: TableSizes, order: list[int], capacity_bytes: int, op_time_s: FloatArray
) -> Bins | None:
    """Return tables each on the device that is least busy of those that take it.

    None when one finds no room, for tightly filled devices leave no choice, or when a device gets
    none.

    Args:
        sizes: of the tables.
        order: all tables, in the order in which they choose.
        capacity_bytes: what each device has.
        op_time_s: seconds of each operator on each of the devices to spread over. Shape (n, D).

    """
    count = op_time_s.shape[1]
    bins: Bins = [()] * count
    held, busy_s = np.zeros(count, dtype=np.int64), np.zeros(count)
    for unit in order:
        after_s = busy_s + op_time_s[sizes.units[unit]].sum(axis=0)
        added = int(sizes.unit_bytes[unit])
        room = np.flatnonzero(sizes.least_bytes + held + added <= capacity_bytes)
        for index in room[np.lexsort((held[room], after_s[room]))].tolist():
            trial = (*bins[index], unit)
            if sizes.needed_bytes(trial) <= capacity_bytes:
                bins[index] = trial
                held[index] += added
                busy_s[index] = after_s[index]
                break
        else:
            return None
    return bins if all(bins) else None
