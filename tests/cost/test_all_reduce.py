"""All-reduces over replicas: known answers by hand, and invariants of any graph."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import split_topology
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.cost.all_reduce import (
    all_reduce_cost,
    partial_values,
    ring_s,
    with_buckets,
)
from fxpart.cost.evaluate import evaluate
from fxpart.errors import SpecError
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem


def _step() -> OpGraph:
    """Return two layers forward and backward, a second per operator; gradients of 40 and 60 bytes.

    Times: forward 0-1, 1-2; backward of the second 2-3, of the first 3-4.
    """
    sketch = Sketch()
    x = sketch.input(8)
    first, second = sketch.weight(40), sketch.weight(60)
    h = sketch.op([x], 8, [first], 1)
    y = sketch.op([h], 8, [second], 1)
    back = sketch.op([y, h], 60, [second], 1, backward_of=1)
    last = sketch.op([back, x], 40, [first], 1, backward_of=0)
    graph = sketch.graph(y, back, last)
    return replace(
        graph,
        gradient_values=np.array([last, back], dtype=np.int64),
        gradient_weights=np.array([0, 1], dtype=np.int64),
    )


def _dims(graph: OpGraph, *partial: int) -> IntArray:
    dims = np.zeros(graph.n_values, dtype=np.int64)
    dims[list(partial)] = -2
    return dims


def test_a_ring_of_two_sends_each_half_twice() -> None:
    # 2 (N - 1) = 2 steps of half the bytes: 100 bytes at 10 bytes/s, and 2 latencies.
    assert ring_s(100, 2, Link(10.0, 0.25)) == pytest.approx(10.0 + 0.5)
    assert ring_s(100, 4, Link(10.0)) == pytest.approx(6 * 2.5)
    assert ring_s(100, 1, Link(10.0, 0.25)) == 0.0


def test_gradients_are_reduced_during_the_backward() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000, link=Link(30.0)), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    evaluation = evaluate(task, placed)
    partial = partial_values(graph, _dims(graph, 3, 4))
    assert partial.tolist() == [3, 4]
    cost = all_reduce_cost(
        task, placed, evaluation, partial=partial, replicas=parts, bucket_bytes=1
    )
    # 60 bytes from second 3 take 2 s, 40 bytes from second 4 wait until 5 and take 4/3 s.
    assert evaluation.latency_s == 4.0
    assert cost.latency_s == pytest.approx(5 + 4 / 3)
    assert cost.exposed_s.tolist() == pytest.approx([5 + 4 / 3 - 4])
    assert cost.busy_s.tolist() == pytest.approx([2 + 4 / 3])
    assert cost.reduced_bytes.tolist() == [100]
    assert cost.sent_bytes.tolist() == [100]
    assert cost.throughput_per_s == pytest.approx(1 / (5 + 4 / 3))
    whole = all_reduce_cost(task, placed, evaluation, partial=partial, replicas=parts)
    # One bucket waits for both: 100 bytes from second 4.
    assert whole.latency_s == pytest.approx(4 + 100 / 30)


def test_a_partial_value_inside_the_model_stalls_the_step() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000, link=Link(30.0)), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    # The result of the first layer (8 bytes) is read by operators whose results are not partial.
    partial = partial_values(graph, _dims(graph, 1))
    assert partial.tolist() == [1]
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.latency_s == pytest.approx(4 + 8 / 30)
    assert cost.exposed_s.tolist() == pytest.approx([8 / 30])
    # If its readers stay partial, only the last result is reduced.
    assert partial_values(graph, _dims(graph, 1, 2, 3, 4)).tolist() == [2, 3, 4]


def test_a_metric_that_nothing_needs_has_the_sum_of_its_replica() -> None:
    sketch = Sketch()
    total = sketch.op([sketch.input(8)], 4)
    metric, result = sketch.op([total], 4), sketch.op([total], 8)
    graph = sketch.graph(result)
    assert partial_values(graph, _dims(graph, total, result)).tolist() == [result]
    # Once its own reader is needed, so is the whole sum.
    returned = sketch.graph(result, metric)
    assert partial_values(returned, _dims(returned, total, result)).tolist() == [total, result]


def test_values_that_are_not_partial_are_not_reduced() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    partial = partial_values(graph, _dims(graph))
    assert partial.tolist() == []
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.latency_s == 4.0
    assert cost.exposed_s.tolist() == [0.0]


def test_updates_wait_for_the_all_reduce() -> None:
    graph = _step()
    step = replace(graph, targets=(*graph.targets[:3], "optimizer.sgd"))
    parts = split_topology(devices(1000, 1000, link=Link(30.0)), 2)
    task = problem(step, parts.replica)
    placed = partition_by_device(step, np.zeros(step.n_ops, dtype=np.int64))
    cost = all_reduce_cost(
        task,
        placed,
        evaluate(task, placed),
        partial=np.array([3], dtype=np.int64),
        replicas=parts,
        bucket_bytes=1,
    )
    # The backward ends at 3, the all-reduce at 5; the update takes the last second.
    assert cost.exposed_s.tolist() == pytest.approx([2.0])
    assert cost.latency_s == pytest.approx(6.0)


def test_views_of_one_gradient_are_reduced_once() -> None:
    sketch = Sketch()
    weight = sketch.weight(40)
    gradient = sketch.op([sketch.input(8)], 40, [weight], 1)
    view = sketch.op([gradient], 40, view_of=gradient, group=0)
    graph = replace(
        sketch.graph(gradient, view),
        gradient_values=np.array([view], dtype=np.int64),
        gradient_weights=np.array([0], dtype=np.int64),
    )
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(2, dtype=np.int64))
    partial = partial_values(graph, _dims(graph, gradient, view))
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.reduced_bytes.tolist() == [40]


def test_buckets_are_held_besides_the_weights() -> None:
    graph = _step()
    bucketed = with_buckets(graph, np.array([3, 4], dtype=np.int64))
    assert bucketed.weight_state_bytes.tolist() == [40, 60]
    assert bucketed.state_tensor_bytes.tolist() == [[40, 60]]
    assert with_buckets(graph, np.array([3], dtype=np.int64)).weight_state_bytes.tolist() == [0, 60]
    # Besides the two states and the step count, as separate tensors.
    with_states = with_buckets(
        with_optimizer(graph, Optimizer("adam")), np.array([3], dtype=np.int64)
    )
    assert with_states.weight_state_bytes.tolist() == [2 * 40 + 4, 3 * 60 + 4]
    assert with_states.state_tensor_bytes.tolist() == [[40, 60], [40, 60], [4, 4], [0, 60]]


def test_two_devices_have_separate_rings_with_their_own_links() -> None:
    """Two replicas on two machines; the second devices are joined by the slower link."""
    graph = _step()
    fast, slow = Link(1000.0), Link(20.0, 1.0)
    whole = devices(1000, 1000, 1000, 1000, link=fast)
    rates, latencies = whole.bytes_per_s.copy(), whole.latency_s.copy()
    for a, b in ((1, 3), (3, 1)):
        rates[a, b], latencies[a, b] = slow.bytes_per_s, slow.latency_s
    parts = split_topology(replace(whole, bytes_per_s=rates, latency_s=latencies), 2)
    assert (parts.rings.tolist(), parts.links) == ([[0, 1], [2, 3]], (fast, slow))
    task = problem(graph, parts.replica)
    # The first layer and its backward on device 0, the second on device 1.
    placed = partition_by_device(graph, np.array([0, 1, 1, 0]))
    evaluation = evaluate(task, placed)
    # 1 s, 8 ms to device 1, 1 s and 1 s there, 60 ms back, 1 s.
    assert evaluation.op_finish_s.tolist() == pytest.approx([1, 2.008, 3.008, 4.068])
    cost = all_reduce_cost(
        task, placed, evaluation, partial=np.array([3, 4], dtype=np.int64), replicas=parts
    )
    assert cost.reduced_bytes.tolist() == [40, 60]
    # Half the bytes twice: 40 ms on device 0; 3 s and two latencies of 1 s on device 1.
    assert cost.busy_s.tolist() == pytest.approx([0.04, 5.0])
    assert cost.within_s.tolist() == [0.0, 0.0]
    assert cost.exposed_s.tolist() == pytest.approx([0.04, 5.0])
    assert cost.latency_s == pytest.approx(3.008 + 5.0)
    # Device 1 computes for 2 s and waits for 5.
    assert cost.throughput_per_s == pytest.approx(1 / 7)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 15),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 4)),
    rate=st.sampled_from([0.5, 4.0, 1000.0]),
    bucket_bytes=st.sampled_from([1, 7, 100]),
    optimizer=st.booleans(),
)
def test_invariants_of_all_reduces(
    *,
    seed: int,
    n: int,
    shape: tuple[int, int],
    rate: float,
    bucket_bytes: int,
    optimizer: bool,
) -> None:
    graph = random_training_graph(seed, n)
    count, n_replicas = shape
    if optimizer and len(graph.gradient_values):
        graph = with_optimizer(graph, Optimizer("adam"))
    parts = split_topology(
        devices(*[10**6] * (count * n_replicas), link=Link(rate, 0.125)), n_replicas
    )
    task, rng = problem(graph, parts.replica), np.random.default_rng(seed)
    device_of = rng.integers(count, size=graph.n_ops)[graph.group]
    placed = partition_by_device(graph, device_of)
    evaluation = evaluate(task, placed)
    chosen = rng.choice([-2, 0], size=graph.n_values)
    # Gradients are results of the backward; values of the optimizer belong to no batch.
    chosen[graph.value_producer >= graph.n_ops - int(graph.is_update.sum())] = 0
    partial = partial_values(graph, chosen.astype(np.int64))
    cost = all_reduce_cost(
        task, placed, evaluation, partial=partial, replicas=parts, bucket_bytes=bucket_bytes
    )
    enough = 1 + 1e-12
    assert (cost.exposed_s >= 0).all()
    assert (cost.within_s >= 0).all()
    assert (cost.busy_s * enough >= cost.within_s).all()
    assert (cost.busy_s * enough + 1e-12 >= cost.exposed_s).all()
    assert cost.latency_s * enough >= evaluation.latency_s
    assert cost.throughput_per_s <= evaluation.throughput_per_s * enough
    assert cost.latency_s <= (evaluation.latency_s + cost.busy_s.sum()) * enough
    # The ring of each device is busy at least as long as one all-reduce of all its bytes.
    least_s = [ring_s(size, n_replicas, Link(rate)) for size in cost.reduced_bytes.tolist()]
    assert (cost.busy_s * enough >= least_s).all()
    assert cost.sent_bytes.tolist() == [
        size * 2 * (n_replicas - 1) // n_replicas for size in cost.reduced_bytes.tolist()
    ]


def test_copies_and_empty_buckets_are_refused() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, devices(1000, 1000))
    copied = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0, 1),))
    on_one_device = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    evaluation = evaluate(task, on_one_device)
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(SpecError, match="saturate_host"):
        all_reduce_cost(task, copied, evaluation, partial=none, replicas=parts)
    with pytest.raises(SpecError, match="bucket_bytes=0"):
        all_reduce_cost(
            task, on_one_device, evaluation, partial=none, replicas=parts, bucket_bytes=0
        )
