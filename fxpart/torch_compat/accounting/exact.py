"""Exact versions of torch's ``cost_aware`` and ``kl_based``: all candidates, by torch's rules.

For each candidate, torch remaps all partitions to devices, then walks the paths over partitions.
This module does the same on arrays: partitions in order, each on the device with the least free
memory that exceeds the bytes the partition adds (``get_device_to_partitions_mapping`` of
``torch.fx.experimental.accelerator_partitioner``). A partition adds the bytes it needs, less those
it reads from partitions on that device. This never underestimates, so a mapping fits.
"""

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.errors import InfeasibleError
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.cost import latency_s, path_over_partitions_s, quotient_of
from fxpart.torch_compat.accounting.device_map import tightest
from fxpart.torch_compat.accounting.problem import StaticPlan, StaticProblem, grouped
from fxpart.torch_compat.accounting.size_based import size_based
from fxpart.torch_compat.accounting.tables import Tables, placing_of, tables_of

__all__ = ["candidate_s", "exact_cost_aware", "exact_kl", "homes_as_torch", "plan_of"]


@compiled
def homes_as_torch(
    tables: Tables, memory: IntArray, part: IntArray, count: int
) -> tuple[bool, IntArray]:
    """Return whether each partition finds a device, and the device of each. O(reads + count * D).

    Args:
        tables: the operators.
        memory: bytes of each device. Shape (D,).
        part: partition of each operator, 0 to count - 1; one may be empty. Shape (n,).
        count: number of partitions.

    """
    used_bytes = placing_of(tables, part, count).used
    start, ops = grouped(part, count)
    home, added = np.full(count, -1, dtype=np.int64), np.empty_like(memory)
    free_bytes, ranking = memory.copy(), np.arange(memory.shape[0])
    for part_id in range(count):
        added[:] = used_bytes[part_id]
        for j in range(start[part_id], start[part_id + 1]):
            for i in range(tables.read_start[ops[j]], tables.read_start[ops[j] + 1]):
                maker = tables.reads[i]
                # A home of -1 belongs to this partition or a later one.
                if home[part[maker]] >= 0:
                    added[home[part[maker]]] -= tables.output[maker]
        home[part_id] = tightest(ranking, free_bytes, added, 1)
        if home[part_id] < 0:
            return False, home
        free_bytes[home[part_id]] -= added[home[part_id]]
    return True, home


@compiled
def candidate_s(tables: Tables, memory: IntArray, part: IntArray, count: int) -> float:
    """Return the latency of partitions on the devices chosen by torch.

    Infinite if a partition finds no device, or partitions form a cycle. Arguments as in
    `homes_as_torch`.
    """
    complete, home = homes_as_torch(tables, memory, part, count)
    if not complete:
        return np.inf
    longest_s = path_over_partitions_s(tables, part, count, home)
    return longest_s if longest_s >= 0 else np.inf


def plan_of(part: IntArray, home: IntArray) -> StaticPlan:
    """Return the plan of partitions, without the empty ones.

    Args:
        part: partition of each operator. Shape (n,).
        home: device of each partition. Shape (P,).

    """
    nonempty, number = np.unique(part, return_inverse=True)
    return StaticPlan(number.astype(np.int64), tuple((int(device),) for device in home[nonempty]))


# ``Partitioner.cost_aware_partition`` starts with one partition per operator. In each round it
# tries to join every pair of partitions whose levels differ by at most one, or of which one reads
# from the other; the level is the longest path from a partition without reads. The pair with the
# least latency (the last if tied) is joined unless that increases the latency, and becomes the last
# partition. Before the first round no partition has a device, so every transfer counts.
#
# If no pair can be joined in the first round, torch returns partitions without a device; here there
# is no plan.


@inlined
def _join_candidates(tables: Tables, part: IntArray, count: int) -> npt.NDArray[np.bool_]:
    """Return the pairs of partitions to try: close in level, or one reading from the other."""
    quotient = quotient_of(tables, part, count, np.arange(count))
    level = np.zeros(count, dtype=np.int64)
    is_candidate = np.zeros((count, count), dtype=np.bool_)
    for position in range(count):
        reader = quotient.order[position]
        for k in range(quotient.parent_start[reader], quotient.parent_start[reader + 1]):
            maker = quotient.parents[k]
            level[reader] = max(level[reader], level[maker] + 1)
            is_candidate[reader, maker] = is_candidate[maker, reader] = True
    for a in range(count):
        for b in range(count):
            if abs(level[a] - level[b]) <= 1:
                is_candidate[a, b] = True
    return is_candidate


@compiled
def _join(part: IntArray, a: int, b: int, count: int, joined: IntArray) -> None:
    """Set `joined` to `part` with partitions a < b merged into the last of `count` - 1."""
    for op in range(part.shape[0]):
        part_id = part[op]
        if part_id in (a, b):
            joined[op] = count - 2
        else:
            joined[op] = part_id - (part_id > a) - (part_id > b)


@compiled
def _combine(tables: Tables, memory: IntArray, n: int) -> tuple[int, IntArray]:
    """Return the number of partitions after all joins, and the partition of each operator."""
    count, part, trial = n, np.arange(n), np.empty(n, dtype=np.int64)
    cost_s = path_over_partitions_s(tables, part, count, np.arange(n))
    while count > 1:
        is_candidate, best_a, best_b = _join_candidates(tables, part, count), -1, -1
        for a in range(count - 1):
            for b in range(a + 1, count):
                if is_candidate[a, b]:
                    _join(part, a, b, count, trial)
                    new_s = candidate_s(tables, memory, trial, count - 1)
                    if new_s <= cost_s:
                        cost_s, best_a, best_b = new_s, a, b
        if best_a < 0:
            break
        _join(part, best_a, best_b, count, trial)
        part[:] = trial
        count -= 1
    return count, part


def exact_cost_aware(problem: StaticProblem) -> StaticPlan | None:
    """Return the plan of the exact search, or None if its partitions find no devices.

    Up to n rounds of O(n * n) candidates, each O(reads).
    """
    tables, memory = tables_of(problem.graph, problem.bytes_per_s), problem.memory_bytes
    count, part = _combine(tables, memory, problem.graph.n_ops)
    complete, home = homes_as_torch(tables, memory, part, count)
    return plan_of(part, home) if complete else None


# ``Partitioner.kl_based_partition`` starts from the size-based plan and visits each operator once,
# in graph order. The operator is tried in every other partition, in exchange for each operator
# there in graph order, and last without exchange. The exchange with the least latency is applied if
# it lowers the latency.
#
# Three faults of torch are not reproduced: it compares the latency of the last exchange instead of
# the best; it looks up an operator at its position before all exchanges; and it keeps devices
# chosen for other partitions than those it returns.


@inlined
def _best_exchange(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, part: IntArray, count: int, op: int, cost_s: float
) -> tuple[float, int, int]:
    """Return the best latency below `cost_s`, the partition for `op`, and its counterpart.

    The partition is -1 if no latency is lower; the counterpart is n for a move without exchange.
    """
    n, origin, trial = part.shape[0], part[op], part.copy()
    best_target, best_other = -1, n
    for target in range(count):
        if target == origin:
            continue
        trial[op] = target
        for counterpart in range(n + 1):
            if counterpart < n:
                if part[counterpart] != target:
                    continue
                trial[counterpart] = origin
            new_s = candidate_s(tables, memory, trial, count)
            if counterpart < n:
                trial[counterpart] = target
            if new_s < cost_s:
                cost_s, best_target, best_other = new_s, target, counterpart
    return cost_s, best_target, best_other


@compiled
def _exchange(
    tables: Tables, memory: IntArray, part: IntArray, count: int, cost_s: float
) -> tuple[bool, IntArray]:
    """Return whether any exchange lowers the latency, and the partitions after all of them."""
    part, any_lowers = part.copy(), False
    for op in range(part.shape[0]):
        cost_s, target, counterpart = _best_exchange(tables, memory, part, count, op, cost_s)
        if target >= 0:
            if counterpart < part.shape[0]:
                part[counterpart] = part[op]
            part[op] = target
            any_lowers = True
    return any_lowers, part


def exact_kl(problem: StaticProblem) -> StaticPlan | None:
    """Return the plan of the exact search, or None if there is no size-based plan to start from.

    Its latency is never above that of the size-based plan. O(n * n) candidates, each O(reads).
    """
    try:
        start = size_based(problem)
    except InfeasibleError:
        return None
    tables, memory = tables_of(problem.graph, problem.bytes_per_s), problem.memory_bytes
    count = len(start.devices_of_partition)
    cost_s = latency_s(problem, start)
    any_lowers, part = _exchange(tables, memory, start.partition_of, count, cost_s)
    if not any_lowers:
        return start
    _, home = homes_as_torch(tables, memory, part, count)
    return plan_of(part, home)
