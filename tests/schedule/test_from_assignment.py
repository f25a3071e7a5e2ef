"""The pipeline costs of a placement: by hand, and against the evaluation of one input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import IMPLEMENTATIONS, Optimizer, with_optimizer
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.errors import SpecError
from fxpart.placement import make_mode
from fxpart.placement.stages.line import stage_line
from fxpart.schedule import StageCost, StageLink, simulate_schedule, stage_costs
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem, random_graph


def _step() -> OpGraph:
    """Return two layers and their backward.

    Layer 0 computes 7 bytes from an input of 3, layer 1 computes 11 from those, the loss has 2.
    Weights have 100 and 200 bytes, like their gradients. The backward reads the input of each
    layer.
    """
    sketch = Sketch()
    x = sketch.input(3)
    first, second = sketch.weight(100), sketch.weight(200)
    hidden = sketch.op([x], 7, [first], 4, module="layer0")
    result = sketch.op([hidden], 11, [second], 6, module="layer1")
    loss = sketch.op([result], 2, [], 1, module="loss")
    of_result = sketch.op([loss, result], 11, [], 1, backward_of=2)
    of_second = sketch.op([of_result, hidden], 200, [], 5, backward_of=1)
    of_hidden = sketch.op([of_result], 7, [second], 6, backward_of=1)
    of_first = sketch.op([of_hidden, x], 100, [], 8, backward_of=0)
    return sketch.graph(loss, of_second, of_first)


def test_a_training_step_by_hand() -> None:
    this = problem(_step(), devices(999, 999, link=Link(10.0, 0.5)))
    placed = make_mode("pipeline", {"cut_after": ["layer0"]})(this)
    costs = stage_costs(this, placed)
    first, second = costs.stages
    assert costs.training
    assert (first.device, second.device) == (0, 1)
    assert (first.forward_s, first.backward_s) == (4, 8)
    assert (second.forward_s, second.backward_s) == (7, 12)
    assert (first.weight_bytes, second.weight_bytes) == (100, 200)
    assert (first.gradient_bytes, second.gradient_bytes) == (100, 200)
    assert (first.input_bytes, second.input_bytes) == (3, 0)
    assert (first.output_bytes, second.output_bytes) == (0, 2)
    # The first saves only its input; the second 7 received and 11 computed.
    assert (first.saved_bytes, second.saved_bytes) == (0, 18)
    assert (first.forward_peak_bytes, second.forward_peak_bytes) == (7, 7 + 11 + 2)
    # The first: 7 received and 100 computed. The second: 11 of the result's gradient, 7, and 200.
    assert (first.backward_peak_bytes, second.backward_peak_bytes) == (107, 11 + 7 + 200)
    # If gradients stay, the 200 are still live when 7 more are computed, the received 7 are not.
    assert second.first_backward_peak_bytes == 11 + 200 + 7
    # 7 bytes at 10 per second after half a second, each way.
    assert costs.links == (StageLink("B", 1, 0, 7, 0.5 + 0.7), StageLink("F", 0, 1, 7, 0.5 + 0.7))
    result = simulate_schedule("gpipe", costs, 1)
    assert result.step_s == pytest.approx(4 + 1.2 + 7 + 12 + 1.2 + 8)


def test_updates_once_per_step_by_hand() -> None:
    step = replace(_step(), gradient_values=np.array([7, 5]), gradient_weights=np.array([0, 1]))
    for implementation, moved, peak, n_temporaries in (("fused", 7, 0, 0), ("foreach", 18, 1, 1)):
        graph = with_optimizer(step, Optimizer("adam", implementation=implementation))
        this = problem(graph, devices(9999, 9999, link=Link(10.0, 0.5)))
        placed = make_mode("pipeline", {"cut_after": ["layer0"]})(this)
        first, second = stage_costs(this, placed).stages
        # A byte takes a second; an update of a weight passes over several tensors of its size.
        assert (first.update_s, second.update_s) == (moved * 100, moved * 200)
        assert (first.update_peak_bytes, second.update_peak_bytes) == (peak * 100, peak * 200)
        assert (first.update_kept_bytes, second.update_kept_bytes) == (
            n_temporaries * 100,
            n_temporaries * 200,
        )
        # Two states, and the number of steps in 4 bytes.
        assert (first.weight_bytes, second.weight_bytes) == (3 * 100 + 4, 3 * 200 + 4)
        # The rest is as without an optimizer.
        plain = partition_by_device(step, placed.device_of[: step.n_ops])
        without = stage_costs(problem(step, this.topology), plain)
        assert _without_updates(first, 100) == without.stages[0]
        assert _without_updates(second, 200) == without.stages[1]
        assert stage_costs(this, placed).links == without.links


def _without_updates(cost: StageCost, weight_bytes: int) -> StageCost:
    return replace(
        cost, weight_bytes=weight_bytes, update_s=0.0, update_peak_bytes=0, update_kept_bytes=0
    )


def test_a_value_is_sent_to_each_device_once() -> None:
    sketch = Sketch()
    a = sketch.op([], 5, [], 1)
    b = sketch.op([a], 3, [], 1)
    c = sketch.op([a, b], 2, [], 1)
    d = sketch.op([a, c], 1, [], 1)
    this = problem(sketch.graph(d), devices(99, 99, 99))
    # Stages 0 to 3 on devices 0, 1, 0, 1.
    costs = stage_costs(this, Assignment(np.arange(4), ((0,), (1,), (0,), (1,))))
    assert [(k.source, k.target, k.sent_bytes) for k in costs.links] == [
        (0, 1, 5),
        (1, 2, 3),
        (2, 3, 2),
    ]
    three = stage_costs(this, Assignment(np.array([0, 1, 2, 2]), ((0,), (1,), (2,))))
    assert [(k.source, k.target, k.sent_bytes) for k in three.links] == [
        (0, 1, 5),
        (0, 2, 5),
        (1, 2, 3),
    ]


def test_a_weight_of_two_stages_on_a_device_counts_once() -> None:
    sketch = Sketch()
    tied = sketch.weight(64)
    a = sketch.op([], 1, [tied], 1)
    b = sketch.op([a], 1, [tied], 1)
    c = sketch.op([b], 1, [tied], 1)
    d = sketch.op([c], 1, [sketch.weight(8)], 1)
    this = problem(sketch.graph(d), devices(99, 99))
    costs = stage_costs(this, Assignment(np.arange(4), ((0,), (1,), (0,), (1,))))
    assert [cost.weight_bytes for cost in costs.stages] == [64, 64, 0, 8]


@settings(max_examples=80)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 4))
def test_one_microbatch_of_inference_equals_the_evaluation(seed: int, n: int, count: int) -> None:
    this = problem(random_graph(seed, n), devices(*[9999] * count, link=Link(4.0, 0.125)))
    count = min(count, stage_line(this).n_units)
    placed = make_mode("pipeline", {"stages": count})(this)
    evaluation = evaluate(this, placed, search_bounds=False)
    costs = stage_costs(this, placed)
    result = simulate_schedule("gpipe", costs, 1)
    assert not result.training
    for position, device in enumerate(result.devices):
        assert result.peak_bytes[position] == evaluation.devices[device].peak_bytes
        assert result.busy_s[position] == pytest.approx(evaluation.devices[device].load_s)
    assert sum(t.sent_bytes for t in result.transfers) == evaluation.transfer_bytes
    # Stages begin when all inputs have arrived, operators when their own have.
    assert result.step_s >= evaluation.latency_s * (1 - 1e-12)


@settings(max_examples=80)
@given(
    st.integers(0, 10_000),
    st.integers(1, 15),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([None, *IMPLEMENTATIONS]),
)
def test_one_microbatch_of_training_equals_the_evaluation(
    seed: int, n: int, count: int, chunks: int, implementation: str | None
) -> None:
    graph = random_training_graph(seed, n)
    if implementation and len(graph.gradient_values):
        graph = with_optimizer(graph, Optimizer("adam", implementation=implementation))
    this = problem(graph, devices(*[9999] * count))
    if chunks * count > stage_line(this).n_units:
        return
    options = {"stages": count * chunks, "interleave": chunks}
    placed = make_mode("pipeline", options)(this)
    evaluation = evaluate(this, placed, search_bounds=False)
    costs = stage_costs(this, placed)
    assert costs.training == bool(this.graph.is_backward.any())
    result = simulate_schedule("interleaved", costs, count)
    # Updates run once, the rest once per micro-batch.
    once = (count - 1) * sum(stage.update_s for stage in costs.stages)
    assert sum(result.busy_s) + once == pytest.approx(
        count * sum(d.load_s for d in evaluation.devices)
    )
    if chunks > 1:
        return
    single = simulate_schedule("1f1b", costs, 1)
    for position, device in enumerate(single.devices):
        assert single.peak_bytes[position] == evaluation.devices[device].peak_bytes


def test_an_assignment_that_is_no_chain_is_refused() -> None:
    sketch = Sketch()
    a = sketch.op([], 1)
    b = sketch.op([a], 1)
    c = sketch.op([b], 1)
    this = problem(sketch.graph(sketch.op([c], 1)), devices(99, 99))
    with pytest.raises(SpecError, match="the 3 of this placement are on devices 0, 1, 0"):
        stage_costs(this, partition_by_device(this.graph, np.array([0, 1, 0, 0])))
    with pytest.raises(SpecError, match="the placement has replicas"):
        stage_costs(this, Assignment(np.zeros(4, dtype=np.int64), ((0, 1),)))


def test_a_backward_on_another_device_is_refused() -> None:
    this = problem(_step(), devices(999, 999))
    placed = partition_by_device(this.graph, np.array([0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(SpecError, match="op3 is on device 1, op2 is not; place the model with"):
        stage_costs(this, placed)
