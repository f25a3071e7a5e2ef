"""What it costs replicas to add up what each has a part of: gradients, and other partial results.

Sums go round a ring, 2 (N - 1) / N of the bytes over each link (Patarasuk, Yuan: Bandwidth optimal
all-reduce algorithms for clusters of workstations. J. Parallel Distrib. Comput. 69(2), 2009,
doi:10.1016/j.jpdc.2008.09.002). Gradients wait for each other in buckets, and a bucket is summed
while the backward goes on (Li et al.: PyTorch distributed: experiences on accelerating data
parallel training. VLDB 2020, doi:10.14778/3415478.3415530).
"""

from dataclasses import dataclass, replace

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.evaluation import Evaluation
from fxpart.data_parallel import DataParallel
from fxpart.errors import SpecError
from fxpart.graph import FloatArray, IntArray, OpGraph
from fxpart.problem import Problem
from fxpart.topology import Link

__all__ = [
    "BUCKET_BYTES",
    "PARTIAL",
    "AllReduce",
    "all_reduce_cost",
    "partial_values",
    "ring_s",
    "with_buckets",
]

BUCKET_BYTES = 25 * 2**20
"""Of torch's DistributedDataParallel, its default ``bucket_cap_mb``."""
PARTIAL = -2
"""Batch dimension of a value that each replica has a part of the sum of."""


@dataclass(frozen=True, eq=False, slots=True)
class AllReduce:
    """What summing over replicas costs; arrays have one item for each device of a replica."""

    reduced_bytes: IntArray
    """Of the tensors that are summed."""
    sent_bytes: IntArray
    """That the device sends round its ring for them."""
    busy_s: FloatArray
    """Time that its ring is busy."""
    exposed_s: FloatArray
    """Time that the device waits for sums after its own backward."""
    latency_s: float
    """Of the whole input, sums included."""
    throughput_per_s: float
    """Inputs a second in a stream, sums included: 1 / the largest load of a device, its waiting
    included, or of a link."""


def ring_s(size_bytes: float, replicas: int, link: Link) -> float:
    """Return the seconds to sum `size_bytes` over a ring of `replicas` joined by such links."""
    if replicas == 1:
        return 0.0
    steps = 2 * (replicas - 1)
    return steps * (size_bytes / replicas / link.bytes_per_s + link.latency_s)


def partial_values(graph: OpGraph, value_batch_dim: IntArray) -> IntArray:
    """Return the values that replicas must sum, in order.

    Of what is partial those are gradients and other results of the graph, and what is read by an
    operator that makes nothing partial of it: such a one needs the sum.

    Args:
        graph: the captured model.
        value_batch_dim: for each value the dimension along which the batch splits it, -1 if every
            replica has the same, `PARTIAL` if each has a part of the sum. Shape (V,).

    """
    partial = value_batch_dim == PARTIAL
    wanted = graph.value_is_output.copy()
    wanted[graph.gradient_values] = True
    makers = graph.value_producer
    hands_on = np.zeros(graph.n_ops, dtype=np.bool_)
    hands_on[makers[partial & (makers >= 0)]] = True
    needs_sum = ~hands_on[graph.readers] & ~graph.is_check[graph.readers]
    wanted[graph.reads[needs_sum]] = True
    return np.flatnonzero(partial & wanted)


def with_buckets(graph: OpGraph, partial: IntArray) -> OpGraph:
    """Return `graph` with room for a copy of each summed gradient beside its weight.

    That is what DistributedDataParallel holds unless ``gradient_as_bucket_view`` is set.
    """
    summed = np.isin(graph.gradient_values, partial)
    held = graph.weight_state_bytes.copy()
    np.add.at(
        held, graph.gradient_weights[summed], graph.value_bytes[graph.gradient_values[summed]]
    )
    return replace(graph, weight_state_bytes=held)


def all_reduce_cost(
    problem: Problem,
    assignment: Assignment,
    evaluation: Evaluation,
    *,
    partial: IntArray,
    replicas: DataParallel,
    bucket_bytes: int = BUCKET_BYTES,
) -> AllReduce:
    """Return what it costs to sum the values `partial` over the replicas.

    A device's values are summed in the order in which they are made, a bucket at a time, each as
    soon as it is full and the ring is free; what the device computes meanwhile goes on. Its updates
    of weights wait for the last sum. Values of one storage are summed once. A value inside the
    model, which other operators wait for, is summed on its own, and everything waits.

    Args:
        problem: of one replica, with its share of the batch.
        assignment: of that problem.
        evaluation: of that assignment.
        partial: as `partial_values` returns them.
        replicas: the devices.
        bucket_bytes: gradients that are summed together, at least.

    Raises:
        SpecError: for a placement with partitions that take turns, or buckets of no size.

    """
    if assignment.replicas > 1:
        raise SpecError(
            "data_parallel copies a placement by itself, this one has copies already; leave out"
            " devices.saturate_host"
        )
    if bucket_bytes < 1:
        raise SpecError(f"all_reduce.bucket_bytes={bucket_bytes} must be 1 or more")
    graph, device_of = problem.graph, assignment.device_of
    devices, n = problem.topology.n_devices, replicas.n_replicas
    reduced = np.zeros(devices, dtype=np.int64)
    busy_s, ring_end_s, within_s = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    ends = graph.value_is_output.copy()
    ends[graph.gradient_values] = True
    values = _own_storages(graph, partial)
    made_by = graph.value_producer[values]
    for device in range(devices):
        mine = values[(made_by >= 0) & (device_of[made_by] == device)]
        ready_s = evaluation.op_finish_s[graph.value_producer[mine]]
        order = np.argsort(ready_s, kind="stable")
        mine, link = mine[order], replicas.links[device]
        late = ends[mine]
        reduced[device] = graph.value_bytes[mine].sum()
        within_s[device] = sum(
            ring_s(size, n, link) for size in graph.value_bytes[mine[~late]].tolist()
        )
        busy_s[device], ring_end_s[device] = _ring_times(
            ready_s[order][late], graph.value_bytes[mine[late]], n, link, bucket_bytes
        )
    busy_s += within_s
    exposed_s, latency_s = _waiting(problem, assignment, evaluation, ring_end_s)
    exposed_s += within_s
    latency_s += float(within_s.sum())
    sent = reduced * 2 * (n - 1) // n
    load_s = np.array([use.load_s for use in evaluation.devices]) + exposed_s
    busiest_s = max(1.0 / evaluation.throughput_per_s, float(load_s.max()), float(busy_s.max()))
    return AllReduce(
        reduced_bytes=reduced,
        sent_bytes=sent,
        busy_s=busy_s,
        exposed_s=exposed_s,
        latency_s=latency_s,
        throughput_per_s=1.0 / busiest_s if busiest_s > 0 else float("inf"),
    )


def _own_storages(graph: OpGraph, values: IntArray) -> IntArray:
    """Return `values` without those that are views of another of them."""
    chosen = set(values.tolist())

    def is_view_of_chosen(value: int) -> bool:
        base = int(graph.value_base[value])
        while base >= 0:
            if base in chosen:
                return True
            base = int(graph.value_base[base])
        return False

    return np.array([v for v in values.tolist() if not is_view_of_chosen(v)], dtype=np.int64)


def _ring_times(
    ready_s: FloatArray, sizes: IntArray, replicas: int, link: Link, bucket_bytes: int
) -> tuple[float, float]:
    """Return the time that a ring is busy, and when it is done, for values in order."""
    busy_s, free_s, waiting = 0.0, 0.0, 0
    for index, (ready, size) in enumerate(zip(ready_s.tolist(), sizes.tolist(), strict=True)):
        waiting += size
        if waiting >= bucket_bytes or index == len(sizes) - 1:
            taken_s = ring_s(waiting, replicas, link)
            free_s = max(free_s, ready) + taken_s
            busy_s += taken_s
            waiting = 0
    return busy_s, free_s


def _waiting(
    problem: Problem, assignment: Assignment, evaluation: Evaluation, ring_end_s: FloatArray
) -> tuple[FloatArray, float]:
    """Return how long each device waits for its sums, and when all is done."""
    graph, device_of = problem.graph, assignment.device_of
    updates = graph.is_update
    exposed_s, latency_s = np.zeros(len(ring_end_s)), evaluation.latency_s
    for device, ring_end in enumerate(ring_end_s.tolist()):
        here = device_of == device
        own = evaluation.op_finish_s[here & ~updates]
        done_s = float(own.max()) if len(own) else 0.0
        exposed_s[device] = max(0.0, ring_end - done_s)
        update = here & updates
        last_s = float(evaluation.op_finish_s[update].max()) if update.any() else done_s
        latency_s = max(latency_s, last_s + float(exposed_s[device]))
    return exposed_s, latency_s
