"""`map_partitions`: assign a device to each partition.

First by the rule of ``get_device_to_partitions_mapping`` in
``torch.fx.experimental.accelerator_partitioner``: partitions in order, each on the device with the
least free memory that exceeds the bytes the partition adds. This rule refuses an exact fit, counts
a source once per partition, and does not deduct bytes already charged to an earlier partition for
reading a later one. If it fails, everything on a device is counted once, an exact fit is accepted,
and other orders are tried.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.problem import (
    BoolArray,
    StaticGraph,
    StaticProblem,
    distinct_rows,
    grouped,
)

__all__ = ["map_partitions", "tightest"]


class _Shares(NamedTuple):
    """Bytes of each partition, and those it shares with others, as CSR rows."""

    used: IntArray
    """Bytes of each partition. Length P."""
    read_start: IntArray
    read_from: IntArray
    """Partitions that each partition reads from, once per read."""
    read_bytes: IntArray
    readers_start: IntArray
    readers: IntArray
    """Partitions that read from each partition, once per read."""
    reader_bytes: IntArray
    source_start: IntArray
    sources: IntArray
    """Sources read by each partition, each once."""
    source_bytes: IntArray


def _shares(graph: StaticGraph, part: IntArray, count: int) -> _Shares:
    """Return the bytes needed and shared by the partitions of `graph`."""
    reader = part[np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))]
    maker = part[graph.reads]
    crossing = reader != maker
    reader, maker = reader[crossing], maker[crossing]
    passed = graph.output_bytes[graph.reads[crossing]]
    user = part[np.repeat(np.arange(graph.n_ops), np.diff(graph.source_start))]
    read_start, read = grouped(reader, count)
    readers_start, read_by = grouped(maker, count)
    return _Shares(
        used_bytes(graph, part, count),
        read_start,
        maker[read],
        passed[read],
        readers_start,
        reader[read_by],
        passed[read_by],
        *distinct_rows(user, graph.sources, count),
        graph.source_bytes,
    )


@compiled
def _added(shares: _Shares, home: IntArray, part: int, added: IntArray) -> None:
    """Set `added` to the bytes that `part` adds to each device, as torch counts them."""
    added[:] = shares.used[part]
    for i in range(shares.read_start[part], shares.read_start[part + 1]):
        device = home[shares.read_from[i]]
        if device >= 0:
            added[device] -= shares.read_bytes[i]


@inlined
def _deduct_shared(
    shares: _Shares, home: IntArray, on_device: BoolArray, part: int, added: IntArray
) -> None:
    """Deduct from `added` the bytes already charged to a device.

    `on_device` marks the sources on each device. Shape (D, m).
    """
    for i in range(shares.readers_start[part], shares.readers_start[part + 1]):
        reader_home = home[shares.readers[i]]
        if reader_home >= 0:
            added[reader_home] -= shares.reader_bytes[i]
    for i in range(shares.source_start[part], shares.source_start[part + 1]):
        for device in range(added.shape[0]):
            if on_device[device, shares.sources[i]]:
                added[device] -= shares.source_bytes[shares.sources[i]]


@inlined
def _sort_by_free(ranking: IntArray, free_bytes: IntArray) -> None:
    """Sort devices by free memory, by a stable insertion sort."""
    for i in range(1, ranking.shape[0]):
        device, j = ranking[i], i
        while j > 0 and free_bytes[ranking[j - 1]] > free_bytes[device]:
            ranking[j] = ranking[j - 1]
            j -= 1
        ranking[j] = device


@compiled
def tightest(ranking: IntArray, free_bytes: IntArray, added: IntArray, spare_bytes: int) -> int:
    """Return the device with the least free memory that has room for the added bytes, or -1.

    Args:
        ranking: devices in the order of the last call; modified. Shape (D,).
        free_bytes: free bytes of each device. Shape (D,).
        added: bytes to be added to each device. Shape (D,).
        spare_bytes: bytes that must remain free; torch requires 1.

    """
    _sort_by_free(ranking, free_bytes)
    for rank in range(ranking.shape[0]):
        device = int(ranking[rank])
        if added[device] + spare_bytes <= free_bytes[device]:
            return device
    return -1


@compiled
def _map_as_torch(shares: _Shares, memory: IntArray, fixed: IntArray) -> tuple[bool, IntArray]:
    """Return whether each partition found a device by torch's rule, and the devices."""
    home, free_bytes, ranking = fixed.copy(), memory.copy(), np.arange(memory.shape[0])
    added = np.empty_like(memory)
    for part in range(fixed.shape[0]):
        if fixed[part] >= 0:
            free_bytes[fixed[part]] -= shares.used[part]
    for part in range(fixed.shape[0]):
        if fixed[part] >= 0:
            continue
        _added(shares, home, part, added)
        home[part] = tightest(ranking, free_bytes, added, 1)
        if home[part] < 0:
            return False, home
        free_bytes[home[part]] -= added[home[part]]
    return True, home


@compiled
def _map_once(
    shares: _Shares, memory: IntArray, fixed: IntArray, order: IntArray
) -> tuple[bool, IntArray]:
    """Return whether each partition found a device, and the devices.

    Everything on a device counts once, and an exact fit is accepted. Partitions with a fixed device
    come first, the others in `order`.
    """
    home = np.full(fixed.shape[0], -1, dtype=np.int64)
    on_device = np.zeros((memory.shape[0], shares.source_bytes.shape[0]), dtype=np.bool_)
    free_bytes, ranking = memory.copy(), np.arange(memory.shape[0])
    added = np.empty_like(memory)
    for turn in (True, False):
        for position in range(order.shape[0]):
            part = position if turn else int(order[position])
            if (fixed[part] >= 0) != turn:
                continue
            _added(shares, home, part, added)
            _deduct_shared(shares, home, on_device, part, added)
            home[part] = fixed[part] if turn else tightest(ranking, free_bytes, added, 0)
            if home[part] < 0:
                return False, home
            free_bytes[home[part]] -= added[home[part]]
            for i in range(shares.source_start[part], shares.source_start[part + 1]):
                on_device[home[part], shares.sources[i]] = True
    return True, home


def map_partitions(
    problem: StaticProblem, partition_of: IntArray, count: int, fixed: Sequence[int]
) -> IntArray | None:
    """Return the position of each partition's device, or None if no order places all of them.

    Args:
        problem: the operators and the devices.
        partition_of: partition of each operator, 0 to count - 1. Shape (n,).
        count: number of partitions.
        fixed: position of each partition's device if already assigned, else -1. Length `count`.

    """
    shares = _shares(problem.graph, partition_of, count)
    memory, chosen = problem.memory_bytes, np.array(fixed, dtype=np.int64)
    in_order = np.arange(count, dtype=np.int64)
    complete, home = _map_as_torch(shares, memory, chosen)
    largest_first = np.argsort(-shares.used, kind="stable").astype(np.int64)
    for order in (in_order, largest_first, in_order[::-1].copy()):
        if complete:
            break
        complete, home = _map_once(shares, memory, chosen, order)
    return home if complete else None
