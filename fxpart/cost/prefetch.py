"""Stalls of a training step with sharded weights: FSDP2's collectives alongside its operators.

Gathers are sequential on one stream and scatters on another, without slowing each other. As in
FSDP2's events, a gather may run two blocks ahead in the forward and one in the backward; a copy out
of a buffer waits for its gather; updates wait for the last scatter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import Link
from fxpart.cost.collectives import CollectiveCurves, collective_time_s

__all__ = ["ShardedStep", "sharded_step"]

_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """The collectives of a step on one device."""

    latency_s: float
    """Latency of the step, including stalls."""
    collectives: int
    collective_bytes: int
    """Bytes of the whole tensors that are gathered or scattered."""
    collective_s: float
    exposed_s: float
    """Time by which the collectives prolong the step."""

    def times(self, microbatches: int, step_s: float) -> "ShardedStep":
        """Return the totals for a step of `microbatches`, each with its own collectives."""
        return ShardedStep(
            step_s,
            microbatches * self.collectives,
            microbatches * self.collective_bytes,
            microbatches * self.collective_s,
            microbatches * self.exposed_s,
        )


def sharded_step(
    graph: OpGraph,
    op_time_s: FloatArray,
    issue_s: FloatArray,
    *,
    replicas: int,
    link: Link,
    targets: Sequence[str],
    curves: CollectiveCurves | None = None,
) -> ShardedStep:
    """Return the cost of the collectives of `graph`, whose operators run in order on one device.

    Args:
        graph: a graph from `fxpart.sharding.zero.with_zero`, including updates.
        op_time_s: time of each operator, 0 for these collectives. Shape (n,).
        issue_s: launch time of each operator (`CostTables.issue_s`). Shape (n,).
        replicas: number of replicas that share the weights.
        link: the slowest link between them.
        targets: targets of gathers, scatters, and waits for a scatter's buffer.
        curves: measured curves of such links, as for `collective_time_s`.

    """
    gather, scatter, wait = targets
    producer = graph.value_producer
    updates = graph.is_update
    now_s = gathers_s = scatters_s = busy_s = alone_s = 0.0
    copied_s: list[float] = []
    done_s: dict[int, float] = {}
    count = total_bytes = 0
    for op, target in enumerate(graph.targets):
        reads = graph.reads_of(op)
        if target == gather:
            size_bytes = int(graph.value_bytes[producer == op].sum())
            seconds = collective_time_s("all_gather", size_bytes, replicas, link, curves)
            ahead = _AHEAD if graph.forward_of[op] == op else 1
            start_s = max(gathers_s, copied_s[-ahead] if len(copied_s) >= ahead else 0.0)
            done_s[op] = gathers_s = start_s + seconds
        elif target == scatter:
            size_bytes = int(graph.value_bytes[reads[0]])
            seconds = collective_time_s("reduce_scatter", size_bytes, replicas, link, curves)
            scatters_s = max(scatters_s, now_s) + seconds
        else:
            source = [int(producer[v]) for v in reads.tolist() if int(producer[v]) in done_s]
            if target == wait or updates[op]:
                now_s = max(now_s, scatters_s)
            if source and target not in (gather, scatter):
                now_s = max(now_s, *(done_s[maker] for maker in source))
            issued_s, seconds = float(issue_s[op]), float(op_time_s[op])
            now_s = max(now_s, issued_s) + seconds
            alone_s = max(alone_s, issued_s) + seconds
            if source:
                copied_s.append(now_s)
            continue
        count, total_bytes, busy_s = count + 1, total_bytes + size_bytes, busy_s + seconds
    latency_s = max(now_s, scatters_s)
    return ShardedStep(latency_s, count, total_bytes, busy_s, latency_s - alone_s)
