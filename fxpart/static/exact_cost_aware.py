"""The exact reading of torch's ``cost_aware``: every candidate, by the rules that it states.

``Partitioner.cost_aware_partition`` of ``torch.fx.experimental.accelerator_partitioner`` starts
with a partition for each operator. In each round it tries to join every two partitions whose levels
differ by at most one, or of which one reads from the other; a level is the longest path from a
partition that reads from none. The pair with the least latency, the last of those that are equal,
is joined if that is not more than before, and becomes the last partition. Before the first round no
partition has a device, so every transfer counts.

Torch ends with partitions without a device when no pair can be joined in the first round; here that
is no result.
"""

import numpy as np
import numpy.typing as npt

from fxpart.compiled import compiled
from fxpart.graph import IntArray
from fxpart.static.cost import path_over_partitions_s, quotient_of
from fxpart.static.exact_candidate import candidate_s, homes_as_torch, plan_of
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.tables import Tables, tables_of

__all__ = ["exact_cost_aware"]


@compiled
def _may_join(tables: Tables, part: IntArray, count: int) -> npt.NDArray[np.bool_]:
    """Return which two partitions may be tried: near in level, or one reads from the other."""
    quotient = quotient_of(tables, part, count, np.arange(count))
    level = np.zeros(count, dtype=np.int64)
    may = np.zeros((count, count), dtype=np.bool_)
    for at in range(count):
        here = quotient.order[at]
        for k in range(quotient.parent_start[here], quotient.parent_start[here + 1]):
            there = quotient.parents[k]
            level[here] = max(level[here], level[there] + 1)
            may[here, there] = may[there, here] = True
    for a in range(count):
        for b in range(count):
            if abs(level[a] - level[b]) <= 1:
                may[a, b] = True
    return may


@compiled
def _join(part: IntArray, a: int, b: int, count: int, joined: IntArray) -> None:
    """Set `joined` to `part` with partitions a < b made the last of `count` - 1."""
    for op in range(part.shape[0]):
        here = part[op]
        if here in (a, b):
            joined[op] = count - 2
        else:
            joined[op] = here - (here > a) - (here > b)


@compiled
def _combine(tables: Tables, memory: IntArray, n: int) -> tuple[int, IntArray]:
    """Return how many partitions are left when no two are joined any more, and each operator's."""
    count, part, trial = n, np.arange(n), np.empty(n, dtype=np.int64)
    cost_s = path_over_partitions_s(tables, part, count, np.arange(n))
    while count > 1:
        may, best_a, best_b = _may_join(tables, part, count), -1, -1
        for a in range(count - 1):
            for b in range(a + 1, count):
                if may[a, b]:
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
    """Return the plan of the exact reading, or None when its partitions find no devices.

    Up to n rounds of O(n * n) candidates, each O(reads).
    """
    tables, memory = tables_of(problem.graph, problem.bytes_per_s), problem.memory_bytes
    count, part = _combine(tables, memory, problem.graph.n_ops)
    found, home = homes_as_torch(tables, memory, part, count)
    return plan_of(part, home) if found else None
