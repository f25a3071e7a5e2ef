"""The exact reading of torch's ``kl_based``: every candidate that it tries, by the rules it states.

``Partitioner.kl_based_partition`` of ``torch.fx.experimental.accelerator_partitioner`` starts from
the size-based plan and takes the operators once, in graph order. Each is tried in every other
partition, in exchange for each operator there, in graph order, and last for none. The one with
the least latency is carried out if that is less than before.

Three faults of torch are not read along. It compares the latency of the last exchange, where that
of the best is meant; it looks an operator up where it was before all exchanges; and it keeps
devices that were chosen for other partitions than those it returns.
"""

from fxpart.compiled import compiled
from fxpart.errors import InfeasibleError
from fxpart.graph import IntArray
from fxpart.static.cost import latency_s
from fxpart.static.exact_candidate import candidate_s, homes_as_torch, plan_of
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.size_based import size_based
from fxpart.static.tables import Tables, tables_of

__all__ = ["exact_kl"]


@compiled
def _best_exchange(  # noqa: PLR0917 - a compiled loop takes arrays
    tables: Tables, memory: IntArray, part: IntArray, count: int, op: int, cost_s: float
) -> tuple[float, int, int]:
    """Return the best latency below `cost_s`, the partition for `op`, and who comes for it.

    The partition is -1 when no latency is lower; the operator that comes is n when none does.
    """
    n, here, trial = part.shape[0], part[op], part.copy()
    best_there, best_other = -1, n
    for there in range(count):
        if there == here:
            continue
        trial[op] = there
        for other in range(n + 1):
            if other < n:
                if part[other] != there:
                    continue
                trial[other] = here
            new_s = candidate_s(tables, memory, trial, count)
            if other < n:
                trial[other] = there
            if new_s < cost_s:
                cost_s, best_there, best_other = new_s, there, other
    return cost_s, best_there, best_other


@compiled
def _exchange(
    tables: Tables, memory: IntArray, part: IntArray, count: int, cost_s: float
) -> tuple[bool, IntArray]:
    """Return whether any exchange lowers the latency, and the partitions after all of them."""
    part, any_lowers = part.copy(), False
    for op in range(part.shape[0]):
        cost_s, there, other = _best_exchange(tables, memory, part, count, op, cost_s)
        if there >= 0:
            if other < part.shape[0]:
                part[other] = part[op]
            part[op] = there
            any_lowers = True
    return any_lowers, part


def exact_kl(problem: StaticProblem) -> StaticPlan | None:
    """Return the plan of the exact reading, or None when there is no size-based one to start from.

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
