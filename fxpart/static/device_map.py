"""Which device holds each partition.

First torch's way, ``get_device_to_partitions_mapping`` of
``torch.fx.experimental.accelerator_partitioner``: partitions in their order, each to the device
with the least memory left that still has more left than the partition adds. It refuses an exact
fit, counts a source once for each partition, and does not take back what an earlier partition was
charged for reading a later one. Where it finds nothing, what lies on a device is counted once, an
exact fit is one, and other orders are tried.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.graph import StaticGraph, StaticProblem
from fxpart.static.memory import used_bytes

__all__ = ["map_partitions", "sort_by_left"]

_Held = npt.NDArray[np.bool_]
"""Whether a source lies on a device. Shape (D, m)."""


class _Shares(NamedTuple):
    """What each partition needs, and what it has in common with others. As CSR rows."""

    used: IntArray
    """Bytes of each partition. Length P."""
    read_start: IntArray
    read_from: IntArray
    """Partitions that a partition reads from, once for each read."""
    read_bytes: IntArray
    readers_start: IntArray
    readers: IntArray
    """Partitions that read from a partition, once for each read."""
    reader_bytes: IntArray
    held_start: IntArray
    held: IntArray
    """Sources that a partition reads, each once."""
    source_bytes: IntArray


def _rows(
    row: IntArray, item: IntArray, size: IntArray, count: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, item, size) triples in CSR form."""
    order = np.argsort(row, kind="stable")
    start = np.searchsorted(row[order], np.arange(count + 1)).astype(np.int64)
    return start, item[order], size[order]


def _shares(graph: StaticGraph, part: IntArray, count: int) -> _Shares:
    """Return what the partitions of `graph` need and have in common."""
    reader = part[np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))]
    maker = part[graph.reads]
    crossing = reader != maker
    reader, maker = reader[crossing], maker[crossing]
    passed = graph.output_bytes[graph.reads[crossing]]
    user = part[np.repeat(np.arange(graph.n_ops), np.diff(graph.source_start))]
    sources = len(graph.source_bytes)
    pairs = np.unique(user * sources + graph.sources)
    holder, held = (pairs // sources, pairs % sources) if sources else (pairs, pairs)
    return _Shares(
        used_bytes(graph, part, count),
        *_rows(reader, maker, passed, count),
        *_rows(maker, reader, passed, count),
        np.searchsorted(holder, np.arange(count + 1)).astype(np.int64),
        held,
        graph.source_bytes,
    )


@compiled
def _added(shares: _Shares, home: IntArray, part: int, added: IntArray) -> None:
    """Set `added` to the bytes by which `part` adds to each device, as torch counts them."""
    added[:] = shares.used[part]
    for i in range(shares.read_start[part], shares.read_start[part + 1]):
        there = home[shares.read_from[i]]
        if there >= 0:
            added[there] -= shares.read_bytes[i]


@compiled
def _take_back(
    shares: _Shares, home: IntArray, on_device: _Held, part: int, added: IntArray
) -> None:
    """Take from `added` what a device is charged for already."""
    for i in range(shares.readers_start[part], shares.readers_start[part + 1]):
        there = home[shares.readers[i]]
        if there >= 0:
            added[there] -= shares.reader_bytes[i]
    for i in range(shares.held_start[part], shares.held_start[part + 1]):
        for device in range(added.shape[0]):
            if on_device[device, shares.held[i]]:
                added[device] -= shares.source_bytes[shares.held[i]]


@compiled
def _hold(shares: _Shares, on_device: _Held, device: int, part: int) -> None:
    """Note that the sources of `part` lie on `device`."""
    for i in range(shares.held_start[part], shares.held_start[part + 1]):
        on_device[device, shares.held[i]] = True


@compiled
def sort_by_left(ranking: IntArray, left: IntArray) -> None:
    """Sort devices by the memory left, those with equal memory in the order that they had."""
    for i in range(1, ranking.shape[0]):
        device, j = ranking[i], i
        while j > 0 and left[ranking[j - 1]] > left[device]:
            ranking[j] = ranking[j - 1]
            j -= 1
        ranking[j] = device


@compiled
def _map(
    shares: _Shares, memory: IntArray, fixed: IntArray, order: IntArray, once: bool
) -> tuple[bool, IntArray]:
    """Return whether each partition found a device, and the devices.

    With `once`, what lies on a device counts once and an exact fit is one; else as in torch.
    """
    devices = memory.shape[0]
    home = np.full(fixed.shape[0], -1, dtype=np.int64)
    on_device = np.zeros((devices, shares.source_bytes.shape[0]), dtype=np.bool_)
    left, ranking = memory.copy(), np.arange(devices)
    added = np.empty(devices, dtype=np.int64)
    for part in range(fixed.shape[0]):
        device = int(fixed[part])
        if device >= 0:
            added[:] = shares.used[part]
            if once:
                _added(shares, home, part, added)
                _take_back(shares, home, on_device, part, added)
                _hold(shares, on_device, device, part)
            left[device] -= added[device]
            home[part] = device
    if not once:
        home[:] = fixed
    for place in range(order.shape[0]):
        part = int(order[place])
        if fixed[part] >= 0:
            continue
        sort_by_left(ranking, left)
        _added(shares, home, part, added)
        if once:
            _take_back(shares, home, on_device, part, added)
        for rank in range(devices):
            device = int(ranking[rank])
            if added[device] < left[device] or (once and added[device] == left[device]):
                home[part] = device
                left[device] -= added[device]
                _hold(shares, on_device, device, part)
                break
        if home[part] < 0:
            return False, home
    return True, home


def map_partitions(
    problem: StaticProblem, partition_of: IntArray, count: int, fixed: Sequence[int]
) -> IntArray | None:
    """Return the position of each partition's device, or None when no order finds one for all.

    Args:
        problem: the operators and the devices.
        partition_of: partition of each operator, 0 to count - 1. Shape (n,).
        count: number of partitions.
        fixed: position of the device of each partition that has one already, else -1. Length
            `count`.

    """
    shares = _shares(problem.graph, partition_of, count)
    memory, chosen = problem.memory_bytes, np.array(fixed, dtype=np.int64)
    in_order = np.arange(count, dtype=np.int64)
    found, home = _map(shares, memory, chosen, in_order, False)
    largest_first = np.argsort(-shares.used, kind="stable").astype(np.int64)
    for order in (in_order, largest_first, in_order[::-1].copy()):
        if found:
            break
        found, home = _map(shares, memory, chosen, order, True)
    return home if found else None
