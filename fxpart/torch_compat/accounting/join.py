"""`join`: merge operators on a device into few partitions without lengthening any path.

Operators on one device with the same maximal number of transfers before them can form a partition:
no path leaves such a set and returns, since each transfer adds one. The same holds for runs of the
set in graph order. So each set is cut into the longest runs that lengthen no path, then pairs are
joined if that lengthens none. If the tries run out before all sets are cut, the remaining sets on
too long a path are divided between pieces that no read connects, or else in the middle.
"""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.cost import path_over_partitions_s, quotient_of
from fxpart.torch_compat.accounting.problem import BoolArray, grouped
from fxpart.torch_compat.accounting.tables import Tables

__all__ = ["join"]


@compiled
def _numbered(label: IntArray) -> tuple[int, IntArray]:
    """Return the number of distinct labels, and labels from 0 in the order of first use."""
    count, number = 0, np.full(int(label.max()) + 1, -1, dtype=np.int64)
    part = np.empty(label.shape[0], dtype=np.int64)
    for op in range(label.shape[0]):
        if number[label[op]] < 0:
            number[label[op]] = count
            count += 1
        part[op] = number[label[op]]
    return count, part


@inlined
def _by_transfers(tables: Tables, device: IntArray, devices: int) -> IntArray:
    """Return labels of (device, maximal number of transfers before the operator)."""
    level, label = np.zeros_like(device), np.empty_like(device)
    for op in range(device.shape[0]):
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            maker = tables.reads[i]
            level[op] = max(level[op], level[maker] + (device[maker] != device[op]))
        label[op] = level[op] * devices + device[op]
    return label


@compiled
def _homes(part: IntArray, device: IntArray, count: int) -> IntArray:
    """Return the device of each partition."""
    homes = np.empty(count, dtype=np.int64)
    for op in range(part.shape[0]):
        homes[part[op]] = device[op]
    return homes


@compiled
def _root(above: IntArray, op: int) -> int:
    """Return the first operator of the piece of `op`: a union-find inside compiled loops."""
    while above[op] != op:
        above[op] = above[above[op]]
        op = above[op]
    return op


@inlined
def _pieces(tables: Tables, part: IntArray) -> IntArray:
    """Return for each operator the first one connected to it by reads inside its partition."""
    above = np.arange(part.shape[0])
    for op in range(part.shape[0]):
        for i in range(tables.read_start[op], tables.read_start[op + 1]):
            maker = tables.reads[i]
            if part[maker] == part[op]:
                a, b = _root(above, op), _root(above, maker)
                above[max(a, b)] = min(a, b)
    for op in range(part.shape[0]):
        above[op] = above[above[op]]
    return above


@inlined
def _through_s(tables: Tables, part: IntArray, count: int, homes: IntArray) -> FloatArray:
    """Return the longest path over partitions through each of them."""
    quotient = quotient_of(tables, part, count, homes)
    rest_s = np.zeros(count)
    for position in range(count - 1, -1, -1):
        part_id = quotient.order[position]
        path_s = rest_s[part_id] + quotient.within_s[part_id]
        for k in range(quotient.parent_start[part_id], quotient.parent_start[part_id + 1]):
            parent = quotient.parents[k]
            rest_s[parent] = max(rest_s[parent], path_s + quotient.passed_s[k])
    return quotient.begin_s + quotient.within_s + rest_s


@inlined
def _divided(tables: Tables, part: IntArray, count: int, long: BoolArray) -> tuple[bool, IntArray]:
    """Return whether any partition marked `long` was divided, and a label for each operator."""
    n, piece = part.shape[0], _pieces(tables, part)
    size, first = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    is_connected = np.ones(count, dtype=np.bool_)
    for op in range(n):
        size[part[op]] += 1
        if first[part[op]] < 0:
            first[part[op]] = op
        is_connected[part[op]] &= piece[op] == first[part[op]]
    visited_count, middle = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    label, divided = np.empty(n, dtype=np.int64), False
    for op in range(n):
        part_id = part[op]
        visited_count[part_id] += 1
        label[op] = first[part_id]
        if not long[part_id] or size[part_id] == 1:
            continue
        divided = True
        if not is_connected[part_id]:
            label[op] = piece[op]
        elif 2 * visited_count[part_id] > size[part_id]:
            if middle[part_id] < 0:
                middle[part_id] = op
            label[op] = middle[part_id]
    return divided, label


@inlined
def _divide_long(
    tables: Tables, device: IntArray, part: IntArray, bound_s: float, max_partitions: int
) -> tuple[float, IntArray]:
    """Return `part` with partitions on paths longer than `bound_s` divided, and the longest path.

    Stops when there is no such path, or before exceeding `max_partitions` partitions.
    """
    last_s, last = np.inf, part
    while True:
        count, part = _numbered(part)
        if count > max_partitions and last_s < np.inf:
            return last_s, last
        through_s = _through_s(tables, part, count, _homes(part, device, count))
        last_s, last = through_s.max(), part
        if last_s <= bound_s:
            return last_s, part
        divided, label = _divided(tables, part, count, through_s > bound_s)
        if not divided:
            return last_s, part
        part = label


@inlined
def _longest_run(
    tables: Tables, device: IntArray, part: IntArray, ops: IntArray, bound_s: float
) -> tuple[int, int]:
    """Make the longest fitting prefix of `ops` a partition; return its length, and the tries.

    `part` numbers a partition by its first operator, so `device` also gives its device.
    """
    n, fitting, longest = part.shape[0], 1, ops.shape[0]
    middle, tries = longest, 0
    while fitting < longest:
        for i in range(fitting, middle):
            part[ops[i]] = ops[0]
        longest_s = path_over_partitions_s(tables, part, n, device)
        tries += 1
        if longest_s <= bound_s:
            fitting = middle
        else:
            for i in range(fitting, middle):
                part[ops[i]] = ops[i]
            longest = middle - 1
        middle = (fitting + longest + 1) // 2
    return fitting, tries


@inlined
def _runs(
    tables: Tables, device: IntArray, label: IntArray, bound_s: float, tries: int
) -> IntArray:
    """Return partitions in which each set of `label` is cut into runs, until tries run out."""
    count, sets = _numbered(label)
    start, ops = grouped(sets, count)
    part = np.arange(label.shape[0])
    for index in range(count):
        low, high = start[index], start[index + 1]
        while low < high and tries > 0:
            length, tried = _longest_run(tables, device, part, ops[low:high], bound_s)
            low += length
            tries -= tried
        for i in range(low, high):
            part[ops[i]] = ops[low]
    return part


@inlined
def _join_pairs(
    tables: Tables, device: IntArray, part: IntArray, bound_s: float, tries: int
) -> IntArray:
    """Return `part` with pairs on one device joined while no path exceeds `bound_s`."""
    count, part = _numbered(part)
    homes = _homes(part, device, count)
    is_merged = np.zeros(count, dtype=np.bool_)
    for a in range(count):
        for b in range(a + 1, count):
            if is_merged[a] or is_merged[b] or homes[a] != homes[b]:
                continue
            if tries == 0:
                return part
            tries -= 1
            joined = np.where(part == b, a, part)
            longest_s = path_over_partitions_s(tables, joined, count, homes)
            if 0 <= longest_s <= bound_s:
                part, is_merged[b] = joined, True
    return part


@compiled
def join(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    device_of: IntArray,
    devices: int,
    bound_s: float,
    tries: int,
    max_partitions: int,
) -> tuple[int, IntArray]:
    """Return the number of partitions and the partition of each operator, numbered by first use.

    Args:
        tables: the operators.
        device_of: device of each operator. Shape (n,).
        devices: number of devices.
        bound_s: at least the longest path over operators. No path over partitions exceeds it,
            unless that requires more than `max_partitions` partitions.
        tries: number of runs, and of pairs, to try. Each takes O(reads).
        max_partitions: maximal number of partitions created to keep paths short.

    """
    part = _by_transfers(tables, device_of, devices)
    count, whole = _numbered(part)
    homes = _homes(whole, device_of, count)
    if path_over_partitions_s(tables, whole, count, homes) > bound_s:
        runs = _runs(tables, device_of, part, bound_s, tries)
        part = runs if _numbered(runs)[0] <= max_partitions else part
    longest_s, part = _divide_long(tables, device_of, part, bound_s, max_partitions)
    part = _join_pairs(tables, device_of, part, max(bound_s, longest_s), tries)
    return _numbered(part)
