"""Cost of all-reducing gradients and other partial results over replicas.

Sums are computed on a ring, with 2 (N - 1) / N of the bytes over each link (Patarasuk, Yuan:
Bandwidth optimal all-reduce algorithms for clusters of workstations. J. Parallel Distrib. Comput.
69(2), 2009, doi:10.1016/j.jpdc.2008.09.002). Gradients are collected in buckets, and a bucket is
reduced while the backward continues (Li et al.: PyTorch distributed: experiences on accelerating
data parallel training. VLDB 2020, doi:10.14778/3415478.3415530).

Rings are timed without contention, but for the adapters of a machine (`ring_links`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as fixed
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import DataParallel
from fxpart.core.graph import PARTIAL, FloatArray, IntArray, OpGraph
from fxpart.core.topology import Link
from fxpart.core.weight_state import with_state
from fxpart.cost.collectives import CollectiveCurves, collective_time_s
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError

__all__ = [
    "BUCKET_BYTES",
    "AllReduce",
    "all_reduce_cost",
    "check_bucket_bytes",
    "partial_values",
    "ring_s",
    "with_buckets",
]

BUCKET_BYTES = 25 * 2**20
"""Default bucket size of torch's DistributedDataParallel (``bucket_cap_mb``)."""


@dataclass(frozen=True, eq=False, slots=True)
class AllReduce:
    """Cost of all-reduces over replicas; arrays have one item per device of a replica."""

    reduced_bytes: IntArray
    """Bytes of the reduced tensors."""
    sent_bytes: IntArray
    """Bytes sent by the device around its ring."""
    busy_s: FloatArray
    """Time that its ring is busy."""
    within_s: FloatArray
    """The part of `busy_s` for values inside the model, during which everything waits."""
    exposed_s: FloatArray
    """Stall time of the device: after its own backward, and for values inside the model."""
    latency_s: float
    """Latency of the input, including all-reduces."""
    throughput_per_s: float
    """Steady-state inputs per second: 1 / the largest load of a device, including stalls, or of a
    link."""


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raise `SpecError` if the bucket size is below 1."""
    if bucket_bytes < 1:
        raise SpecError(f"all_reduce.bucket_bytes={bucket_bytes} must be 1 or more")


def ring_s(
    size_bytes: float, replicas: int, link: Link, curves: CollectiveCurves | None = None
) -> float:
    """Return the seconds to all-reduce `size_bytes` over a ring of `replicas` with such links."""
    return collective_time_s("all_reduce", size_bytes, replicas, link, curves)


def partial_values(graph: OpGraph, value_batch_dim: IntArray) -> IntArray:
    """Return the values that replicas must all-reduce, in order.

    These are the partial sums that are gradients or other results of the graph, or are read by an
    operator without partial results, which needs the full sum. Operators whose results nothing
    needs, such as a metric that is not returned, may have those of their replica.

    Args:
        graph: the captured model.
        value_batch_dim: batch dimension of each value, -1 if it is replicated, `PARTIAL` for
            partial sums. Shape (V,).

    """
    partial = value_batch_dim == PARTIAL
    is_needed = graph.value_is_output.copy()
    is_needed[graph.gradient_values] = True
    makers = graph.value_producer
    has_partial_result = np.zeros(graph.n_ops, dtype=np.bool_)
    has_partial_result[makers[partial & (makers >= 0)]] = True
    needs_sum = ~has_partial_result & ~graph.is_check & _contributes(graph)
    needs_sum = needs_sum[graph.readers]
    is_needed[graph.reads[needs_sum]] = True
    return np.flatnonzero(partial & is_needed)


def _contributes(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return which operators the outputs, gradients or updates of `graph` depend on. Length n."""
    is_needed = graph.value_is_output.copy()
    is_needed[graph.gradient_values] = True
    is_last = graph.is_update.copy()
    is_last[graph.value_producer[is_needed & (graph.value_producer >= 0)]] = True
    # Lists, since reading an array item by item is slow.
    contributes, starts = is_last.tolist(), graph.read_start.tolist()
    makers: list[int] = graph.value_producer[graph.reads].tolist()
    for op in range(graph.n_ops - 1, -1, -1):
        if contributes[op]:
            for maker in makers[starts[op] : starts[op + 1]]:
                if maker >= 0:
                    contributes[maker] = True
    return np.array(contributes, dtype=np.bool_)


def with_buckets(graph: OpGraph, partial: IntArray) -> OpGraph:
    """Return `graph` with a bucket copy of each reduced gradient as state of its weight.

    DistributedDataParallel keeps these unless ``gradient_as_bucket_view`` is set. Each copy counts
    as a tensor of its own, although a bucket holds many.
    """
    summed = np.isin(graph.gradient_values, partial)
    sizes = graph.value_bytes[graph.gradient_values[summed]]
    return with_state(graph, graph.gradient_weights[summed], [sizes])


def all_reduce_cost(
    problem: Problem,
    assignment: Assignment,
    evaluation: Evaluation,
    *,
    partial: IntArray,
    replicas: DataParallel,
    ranks: IntArray | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    curves: CollectiveCurves | None = None,
) -> AllReduce:
    """Return the cost of all-reducing the values `partial` over the replicas.

    A device's values are reduced in the order in which they are produced, one bucket at a time, as
    soon as a bucket is full and the ring is free, while the device continues to compute. Its weight
    updates wait for the last reduction. Values that share a storage are reduced once. A value
    inside the model, which other operators wait for, is reduced on its own while everything waits.

    Args:
        problem: the problem of one replica, with its share of the batch.
        assignment: an assignment for that problem.
        evaluation: the evaluation of that assignment.
        partial: the result of `partial_values`.
        replicas: the devices.
        ranks: number of replicas over which each of `partial` is reduced; None for all. Each number
            has its own buckets.
        bucket_bytes: smallest size of a full bucket.
        curves: measured curves of the rings' links, as for `collective_time_s`.

    Raises:
        SpecError: if the placement has replicated partitions, or the bucket size is below 1.

    """
    if assignment.replicas > 1:
        raise SpecError(
            "data_parallel copies a placement itself, but this one has copies already; leave out "
            "devices.saturate_host"
        )
    check_bucket_bytes(bucket_bytes)
    device_of, n = assignment.device_of, replicas.n_replicas
    sums = _sums(
        problem.graph, partial, evaluation, np.full_like(partial, n) if ranks is None else ranks
    )
    costs = [
        _of_device(
            sums.chosen(device_of[sums.made_by] == device),
            fixed(ring_s, link=link, curves=curves),
            bucket_bytes,
        )
        for device, link in enumerate(replicas.links)
    ]
    reduced = np.array([cost.reduced_bytes for cost in costs], dtype=np.int64)
    within_s = np.array([cost.within_s for cost in costs])
    busy_s = within_s + np.array([cost.after_s for cost in costs])
    ring_end_s = np.array([cost.end_s for cost in costs])
    exposed_s, latency_s = _waiting(problem, assignment, evaluation, ring_end_s)
    exposed_s += within_s
    load_s = np.array([use.load_s for use in evaluation.devices]) + exposed_s
    busiest_s = max(1.0 / evaluation.throughput_per_s, float(load_s.max()), float(busy_s.max()))
    return AllReduce(
        reduced_bytes=reduced,
        sent_bytes=np.array([cost.sent_bytes for cost in costs], dtype=np.int64),
        busy_s=busy_s,
        within_s=within_s,
        exposed_s=exposed_s,
        latency_s=latency_s + float(within_s.sum()),
        throughput_per_s=1.0 / busiest_s if busiest_s > 0 else float("inf"),
    )


class _Sums(NamedTuple):
    """K reduced values, in the order in which they are produced. Length K each."""

    size_bytes: IntArray
    made_by: IntArray
    ready_s: FloatArray
    is_late: npt.NDArray[np.bool_]
    """Whether it is a gradient or another result, for which nothing in the model waits."""
    ranks: IntArray
    """Number of replicas over which it is reduced."""

    def chosen(self, selection: npt.NDArray[np.generic]) -> "_Sums":
        """Return a subset; `selection` is a mask of length K or an array of indices."""
        return _Sums(
            self.size_bytes[selection],
            self.made_by[selection],
            self.ready_s[selection],
            self.is_late[selection],
            self.ranks[selection],
        )


class _DeviceSums(NamedTuple):
    """Totals of one device's all-reduces."""

    reduced_bytes: int
    sent_bytes: int
    within_s: float
    after_s: float
    """Busy time of its ring for values that nothing in the model waits for."""
    end_s: float
    """When the ring is done."""


def _sums(graph: OpGraph, partial: IntArray, evaluation: Evaluation, ranks: IntArray) -> _Sums:
    ranks_of = np.ones(graph.n_values, dtype=np.int64)
    ranks_of[partial] = ranks
    values = _own_storages(graph, partial)
    values = values[graph.value_producer[values] >= 0]
    made_by = graph.value_producer[values]
    is_late = graph.value_is_output.copy()
    is_late[graph.gradient_values] = True
    ready_s = evaluation.op_finish_s[made_by]
    whole = _Sums(graph.value_bytes[values], made_by, ready_s, is_late[values], ranks_of[values])
    return whole.chosen(np.argsort(ready_s, kind="stable"))


_SumTime = Callable[[float, int], float]
"""Maps (bytes, number of replicas) to seconds."""


def _of_device(sums: _Sums, sum_s: _SumTime, bucket_bytes: int) -> _DeviceSums:
    """Return the totals of `sums`, timed by `sum_s`."""
    late = sums.is_late
    within_s = sum(map(sum_s, sums.size_bytes[~late].tolist(), sums.ranks[~late].tolist()))
    after_s, end_s = _ring_times(sums.chosen(late), sum_s, bucket_bytes)
    sizes, n = sums.size_bytes, sums.ranks
    reduced = {int(r): int(sizes[n == r].sum()) for r in np.unique(n)}
    sent = sum(size * 2 * (r - 1) // r for r, size in reduced.items())
    return _DeviceSums(sum(reduced.values()), sent, float(within_s), after_s, end_s)


def _own_storages(graph: OpGraph, values: IntArray) -> IntArray:
    """Return `values` without views of other ones of them."""
    chosen = set(values.tolist())

    def is_view_of_chosen(value: int) -> bool:
        base = int(graph.value_base[value])
        while base >= 0:
            if base in chosen:
                return True
            base = int(graph.value_base[base])
        return False

    return np.array([v for v in values.tolist() if not is_view_of_chosen(v)], dtype=np.int64)


def _ring_times(sums: _Sums, sum_s: _SumTime, bucket_bytes: int) -> tuple[float, float]:
    """Return the busy time of a ring and when it is done, for values in order."""
    busy_s, free_s = 0.0, 0.0
    bucket_fill: dict[int, int] = {}
    ranks = sums.ranks.tolist()
    last = {n: index for index, n in enumerate(ranks)}
    columns = zip(sums.ready_s.tolist(), sums.size_bytes.tolist(), ranks, strict=True)
    for index, (ready, size, n) in enumerate(columns):
        bucket_fill[n] = bucket_fill.get(n, 0) + size
        if bucket_fill[n] >= bucket_bytes or index == last[n]:
            reduce_s = sum_s(bucket_fill.pop(n), n)
            free_s = max(free_s, ready) + reduce_s
            busy_s += reduce_s
    return busy_s, free_s


def _waiting(
    problem: Problem, assignment: Assignment, evaluation: Evaluation, ring_end_s: FloatArray
) -> tuple[FloatArray, float]:
    """Return the stall of each device for its reductions, and the end of the whole step."""
    graph, device_of = problem.graph, assignment.device_of
    updates = graph.is_update
    exposed_s, latency_s = np.zeros(len(ring_end_s)), evaluation.latency_s
    for device, ring_end in enumerate(ring_end_s.tolist()):
        on_device = device_of == device
        finish_s = evaluation.op_finish_s[on_device & ~updates]
        done_s = float(finish_s.max()) if len(finish_s) else 0.0
        exposed_s[device] = max(0.0, ring_end - done_s)
        update = on_device & updates
        last_s = float(evaluation.op_finish_s[update].max()) if update.any() else done_s
        latency_s = max(latency_s, last_s + float(exposed_s[device]))
    return exposed_s, latency_s
