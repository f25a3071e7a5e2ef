"""Sums over replicas: known answers by hand, and what must hold of any graph."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.assignment import Assignment
from fxpart.cost.all_reduce import (
    all_reduce_cost,
    partial_values,
    ring_s,
    with_buckets,
)
from fxpart.cost.evaluate import evaluate
from fxpart.data_parallel import split_topology
from fxpart.errors import SpecError
from fxpart.graph import IntArray, OpGraph
from fxpart.partitions import partition_by_device
from fxpart.topology import Link
from tests.sketch import Sketch, devices, problem


def _step() -> OpGraph:
    """Return two layers forward and backward, an operator a second; gradients of 40 and 60 bytes.

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


def test_gradients_are_summed_while_the_backward_goes_on() -> None:
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


def test_a_partial_value_inside_the_model_makes_all_wait() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000, link=Link(30.0)), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    # What the first layer makes (8 bytes) is read by operators that make nothing partial of it.
    partial = partial_values(graph, _dims(graph, 1))
    assert partial.tolist() == [1]
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.latency_s == pytest.approx(4 + 8 / 30)
    assert cost.exposed_s.tolist() == pytest.approx([8 / 30])
    # If its readers hand it on, only what comes out in the end is summed.
    assert partial_values(graph, _dims(graph, 1, 2, 3, 4)).tolist() == [2, 3, 4]


def test_what_is_not_partial_is_not_summed() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    partial = partial_values(graph, _dims(graph))
    assert partial.tolist() == []
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.latency_s == 4.0
    assert cost.exposed_s.tolist() == [0.0]


def test_updates_wait_for_the_sums() -> None:
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
    # The backward ends at 3, the sum at 5, the update takes the last second.
    assert cost.exposed_s.tolist() == pytest.approx([2.0])
    assert cost.latency_s == pytest.approx(6.0)


def test_views_of_one_gradient_are_summed_once() -> None:
    sketch = Sketch()
    weight = sketch.weight(40)
    made = sketch.op([sketch.input(8)], 40, [weight], 1)
    view = sketch.op([made], 40, view_of=made, group=0)
    graph = replace(
        sketch.graph(made, view),
        gradient_values=np.array([view], dtype=np.int64),
        gradient_weights=np.array([0], dtype=np.int64),
    )
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, parts.replica)
    placed = partition_by_device(graph, np.zeros(2, dtype=np.int64))
    partial = partial_values(graph, _dims(graph, made, view))
    cost = all_reduce_cost(task, placed, evaluate(task, placed), partial=partial, replicas=parts)
    assert cost.reduced_bytes.tolist() == [40]


def test_buckets_lie_beside_the_weights() -> None:
    graph = _step()
    held = with_buckets(graph, np.array([3, 4], dtype=np.int64))
    assert held.weight_state_bytes.tolist() == [40, 60]
    assert with_buckets(graph, np.array([3], dtype=np.int64)).weight_state_bytes.tolist() == [0, 60]


def test_copies_and_empty_buckets_are_refused() -> None:
    graph = _step()
    parts = split_topology(devices(1000, 1000), 2)
    task = problem(graph, devices(1000, 1000))
    copied = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0, 1),))
    alone = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    evaluation = evaluate(task, alone)
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(SpecError, match="saturate_host"):
        all_reduce_cost(task, copied, evaluation, partial=none, replicas=parts)
    with pytest.raises(SpecError, match="bucket_bytes=0"):
        all_reduce_cost(task, alone, evaluation, partial=none, replicas=parts, bucket_bytes=0)
