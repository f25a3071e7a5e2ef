"""`least_latency`: search for the placement with the least predicted latency.

Start from several placements, each a cut of an operator order into one run per device; walk from
the best of them by simulated annealing; undo moves that did not help; join operators into few
partitions. Work is counted in visited operators, so that the result is deterministic.
"""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.errors import InfeasibleError
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.annealing import settle, walk
from fxpart.torch_compat.accounting.contiguous import contiguous, delays, steps_over
from fxpart.torch_compat.accounting.cost import latency_s
from fxpart.torch_compat.accounting.join import join
from fxpart.torch_compat.accounting.neighbours import (
    Moved,
    Paths,
    keep_if_short,
    move,
    nothing_moved,
    paths_of,
    undo,
)
from fxpart.torch_compat.accounting.problem import StaticPlan, StaticProblem
from fxpart.torch_compat.accounting.size_based import (
    alone_bytes,
    no_plan,
    size_based,
    too_large_alone,
)
from fxpart.torch_compat.accounting.tables import (
    Placing,
    Tables,
    fits,
    heads,
    longest,
    placing_of,
    tables_of,
    tails,
)

__all__ = ["depth_first", "least_latency", "orders", "tidy"]


_WALKS, _HEAT = 12, 6.0
"""Walks from the starts, and their initial temperature as a share of the possible gain. Short, hot
walks found more than long or cool ones on random graphs in the same time. The exact values matter
little: on 136 random graphs of up to 60 operators, half or twice the walks or the work, or a heat
of 2 or 12, changes the mean latency by less than 0.3 %."""

_WALK_WORK, _WORK_EACH = 3_000, 10
"""Operators that a walk may visit: a constant, plus this many per operator of the graph."""

_MANY_OPS, _MORE_WORK_EACH = 500, 60
"""Beyond this many operators, extra work per further operator: longest paths of large graphs have
many transfers, each of which must be drawn at random."""

_REPAIR_TRIES, _REPAIR_TRIES_EACH = 200, 20
"""Tries to repair a cut that nearly fits: a constant, plus this many per operator."""

_SETTLE_TRIES, _SETTLE_TRIES_EACH = 5_000, 50
"""Tries to repair a placement that is far from fitting, only if memory is tight: a constant, plus
this many per operator."""

_JOIN_TRIES, _JOIN_WORK = 200, 100_000
"""Least number of tries to join partitions, and the number of visited operators up to which more
are allowed; each try visits every operator."""

_ROUNDING = 1e-12
"""Relative difference of reordered sums."""

_FEW_STARTS = 5
"""If fewer starts fit, memory is tight, and more are searched for."""

_EXACT_OPS, _MOST_PARTITIONS = 512, 128
"""Up to this many operators, any number of partitions is accepted for the least latency; in larger
graphs, a longer path is accepted to stay within this many partitions."""


# Orders of the operators to cut into runs.


@compiled
def depth_first(tables: Tables) -> IntArray:
    """Return a topological order that places operators soon after their reads. Shape (n,).

    Among ready operators, the one that became ready last comes next.
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
    """Return the graph order, a depth-first order, and orders by earliest end and least slack.

    Args:
        tables: the operators.
        head: longest path that ends with each operator, without transfers. Shape (n,).
        tail: longest path that begins after each operator. Shape (n,).

    """
    n = len(head)
    by_end = np.argsort(head, kind="stable").astype(np.int64)
    by_slack = np.argsort(-(head + tail), kind="stable").astype(np.int64)
    return [np.arange(n, dtype=np.int64), depth_first(tables), by_end, by_slack]


# Reduce transfers: a walk scatters operators off the long paths, which costs traffic and partitions
# but no latency.


@compiled
def _transferred(tables: Tables, device: IntArray, op: int, target: int) -> float:
    """Return the seconds of all transfers to and from `op` if placed on device `target`."""
    total_s = 0.0
    for i in range(tables.read_start[op], tables.read_start[op + 1]):
        if device[tables.reads[i]] != target:
            total_s += tables.read_s[i]
    for i in range(tables.reader_start[op], tables.reader_start[op + 1]):
        if device[tables.readers[i]] != target:
            total_s += tables.reader_s[i]
    return total_s


@inlined
def _moves(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables,
    memory: IntArray,
    placing: Placing,
    moved: Moved,
    paths: Paths,
    bound_s: float,
    op: int,
    target: int,
) -> tuple[bool, int]:
    """Move `op` if it fits and no path exceeds `bound_s`; return whether moved, and the work."""
    move(tables, placing, moved, op, target)
    if not fits(placing, memory):
        undo(tables, placing, moved)
        return False, 1
    accepted, visited = keep_if_short(tables, placing, moved, paths, bound_s)
    return accepted, 1 + visited


@compiled
def tidy(tables: Tables, memory: IntArray, start: IntArray, bound_s: float, work: int) -> IntArray:
    """Return a placement with fewer transfers, and no path longer than `bound_s`.

    Visits the operators in graph order, in rounds, until a round changes nothing or `work`
    operators have been visited. `start` must fit the devices.
    """
    n, devices = start.shape[0], memory.shape[0]
    placing, moved = placing_of(tables, start, devices), nothing_moved(n)
    device, paths = placing.device, paths_of(tables, start)
    work_done, changed = 0, True
    while changed:
        changed = False
        for op in range(n):
            now_s = _transferred(tables, device, op, device[op])
            work_done += 1
            if now_s == 0:
                continue
            for target in range(devices):
                if work_done > work:
                    return device
                if target == device[op] or _transferred(tables, device, op, target) >= now_s:
                    continue
                moved_op, visited = _moves(
                    tables, memory, placing, moved, paths, bound_s, op, target
                )
                work_done += visited
                if moved_op:
                    changed = True
                    break
    return device


# The search.


def _work(n: int) -> int:
    """Return the number of operators a walk may visit."""
    return _WALK_WORK + _WORK_EACH * n + _MORE_WORK_EACH * max(0, n - _MANY_OPS)


def _filled(problem: StaticProblem) -> StaticPlan | None:
    """Return the size-based plan, or None if infeasible."""
    try:
        return size_based(problem)
    except InfeasibleError:
        return None


def _devices(plan: StaticPlan) -> IntArray:
    """Return the device of each operator."""
    homes = np.array([homes[0] for homes in plan.devices_of_partition], dtype=np.int64)
    device_of: IntArray = homes[plan.partition_of]
    return device_of


def _spread(problem: StaticProblem, turn: int) -> IntArray:
    """Return devices in proportion to their memory, starting at device `turn`; may not fit."""
    devices = len(problem.memory_bytes)
    order = np.roll(np.arange(devices, dtype=np.int64), -turn)
    running = np.cumsum(problem.graph.total_bytes).astype(float)
    ends = np.cumsum(problem.memory_bytes[order]).astype(float)
    share = running / max(running[-1], 1.0)
    part = np.minimum(np.searchsorted(ends / ends[-1], share - _ROUNDING), devices - 1)
    device_of: IntArray = order[part]
    return device_of


def _starts(problem: StaticProblem, tables: Tables, candidates: list[IntArray]) -> list[IntArray]:
    """Return those of `candidates` and further placements that fit, shortest paths first."""
    memory, n = problem.memory_bytes, problem.graph.n_ops
    together = np.zeros(n, dtype=np.int64)
    head, tail = heads(tables, together), np.zeros(n)
    tails(tables, together, tail, n - 1)
    reader = np.repeat(np.arange(n), np.diff(tables.read_start))
    path_s = head[tables.reads] + tables.read_s + tables.seconds[reader] + tail[reader]
    alone_s = np.maximum(path_s - longest(head), 0.0)
    steps, candidates = steps_over(memory), list(candidates)
    for order in orders(tables, head, tail):
        boundary = delays(tables, order, alone_s)
        candidates.append(contiguous(tables, order, boundary, memory, steps))
    fitting, repairs = [], _REPAIR_TRIES + _REPAIR_TRIES_EACH * n
    for device_of in candidates:
        if (device_of >= 0).all():
            placing = placing_of(tables, device_of, len(memory))
            good, settled = fits(placing, memory), device_of
            if not good:
                good, settled = settle(tables, memory, device_of, repairs, 0.0, 1)
            if good:
                fitting.append(settled)
    heat_bytes = float(problem.graph.total_bytes.mean())
    for turn in range(_FEW_STARTS):
        if len(fitting) < _FEW_STARTS:
            spread, tries = _spread(problem, turn), _SETTLE_TRIES + _SETTLE_TRIES_EACH * n
            good, settled = settle(tables, memory, spread, tries, heat_bytes, turn)
            if good:
                fitting.append(settled)
    return sorted(fitting, key=lambda device_of: longest(heads(tables, device_of)))


def _joined(tables: Tables, device_of: IntArray, devices: int, bound_s: float) -> StaticPlan:
    """Return the plan with these devices, in few partitions."""
    n = len(device_of)
    max_partitions = n if n <= _EXACT_OPS else _MOST_PARTITIONS
    tries = max(_JOIN_TRIES, _JOIN_WORK // n)
    count, part = join(tables, device_of, devices, bound_s, tries, max_partitions)
    home = np.empty(count, dtype=np.int64)
    home[part] = device_of
    return StaticPlan(part, tuple((int(device),) for device in home))


def least_latency(problem: StaticProblem) -> StaticPlan:
    """Return the placement with the least latency that was found, in few partitions.

    Its latency is never above that of the size-based plan.

    Raises:
        InfeasibleError: if no placement was found that fits the devices.

    """
    tables, memory = tables_of(problem.graph, problem.bytes_per_s), problem.memory_bytes
    n, filled = problem.graph.n_ops, _filled(problem)
    starts = _starts(problem, tables, [_devices(filled)] if filled else [])
    if not starts:
        raise too_large_alone(problem, alone_bytes(problem.graph)) or no_plan(
            problem, "give more memory"
        )
    least_s = longest(heads(tables, np.zeros(n, dtype=np.int64)))
    best, best_s = starts[0], longest(heads(tables, starts[0]))
    for seed in range(_WALKS):
        if best_s <= least_s:
            break
        start = starts[seed // 2 % len(starts)] if seed % 2 else best
        walked_s, walked = walk(tables, memory, start, least_s, _work(n), _HEAT, seed)
        if walked_s < best_s:
            best, best_s = walked, walked_s
    bound_s = best_s * (1 + _ROUNDING)
    best = tidy(tables, memory, best, bound_s, _work(n))
    plan = _joined(tables, best, len(memory), bound_s)
    if filled and n > _EXACT_OPS and latency_s(problem, filled) < latency_s(problem, plan):
        return filled
    return plan
