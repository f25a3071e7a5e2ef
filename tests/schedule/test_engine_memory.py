"""Predicted memory of torch's engine, by hand. Against real runs: tests/execution."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.partitions import partition_by_device
from fxpart.errors import SpecError
from fxpart.placement import make_mode
from fxpart.placement.stages.line import stage_line
from fxpart.schedule import EngineStage, engine_peak_bytes, engine_stages, stage_costs
from fxpart.schedule.from_assignment import tied_parts
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem

TWO = Assignment(np.array([0, 0, *[1] * 8, 0, 0]), ((0,), (1,)))
FIRST = EngineStage(
    weight_bytes=100,
    gradient_bytes=100,
    input_bytes=3,
    received_bytes=0,
    received_gradient_bytes=7,
    held_bytes=12,
    sent_bytes=12,
    sent_gradient_bytes=0,
    forward_peak_bytes=12,
    backward_peak_bytes=100,
    first_backward_peak_bytes=100,
)
SECOND = EngineStage(
    weight_bytes=300,
    gradient_bytes=300,
    input_bytes=0,
    # 7 that depend on a weight, and 5 that do not: for these no gradient is returned.
    received_bytes=12,
    received_gradient_bytes=0,
    # The backward reads 11, 13 and the loss.
    held_bytes=26,
    sent_bytes=0,
    sent_gradient_bytes=7,
    forward_peak_bytes=26,
    # The gradient of 11 bytes, and the one of 200 computed from it.
    backward_peak_bytes=211,
    # At the end: both gradients of weights, 11, and the 7 computed from them.
    first_backward_peak_bytes=318,
)


def _step() -> OpGraph:
    """Return a step of two stages that share a weight of 100 bytes."""
    sketch = Sketch()
    x = sketch.input(3)
    tied, untied = sketch.weight(100), sketch.weight(200)
    hidden = sketch.op([x], 7, [tied])
    mask = sketch.op([x], 5)
    result = sketch.op([hidden, mask], 11, [untied])
    logits = sketch.op([result], 13, [tied])
    loss = sketch.op([logits], 2)
    of_logits = sketch.op([loss, logits], 13, backward_of=4)
    part = sketch.op([of_logits, result], 100, backward_of=3)
    of_result = sketch.op([of_logits], 11, [tied], backward_of=3)
    of_untied = sketch.op([of_result, hidden], 200, backward_of=2)
    of_hidden = sketch.op([of_result], 7, [untied], backward_of=2)
    other_part = sketch.op([of_hidden, x], 100, backward_of=0)
    of_tied = sketch.op([other_part, part], 100, backward_of=0)
    return sketch.graph(loss, of_untied, of_tied)


def test_the_stages_of_a_step_by_hand() -> None:
    this = problem(_step(), devices(999, 999))
    assert engine_stages(this, TWO) == (FIRST, SECOND)
    # The part of the tied weight is exchanged after the step, and no link carries it.
    assert np.flatnonzero(tied_parts(this.graph, TWO.device_of)).tolist() == [7]
    links = stage_costs(this, TWO).links
    assert [(k.kind, k.sent_bytes) for k in links] == [("B", 7), ("F", 12)]


@pytest.mark.parametrize(
    ("name", "result", "peaks"),
    [
        # First: 24 passed on, a gradient, and one more. Second: 26 of the last micro-batch are part
        # of its backward; 300 of gradients, and 7 that were sent.
        ("gpipe", 0, (120 + 24 + 200, 324 + 300 + 7 + 211)),
        ("1f1b", 0, (120 + 12 + 200, 324 + 300 + 7 + 211)),
        ("gpipe", 13, (344, 842 + 13)),
        ("1f1b", 13, (332, 842 + 13)),
        # While the second forward runs, the results of the first are still there: 7 that were
        # sent, 26, and two results.
        ("1f1b", 300, (332, 324 + 300 + 7 + 26 + 600)),
        # All results, before the first backward.
        ("gpipe", 300, (344, 324 + 26 + 600 + 318)),
    ],
)
def test_a_training_step_by_hand(name: str, result: int, peaks: tuple[int, int]) -> None:
    computed = engine_peak_bytes(name, (FIRST, SECOND), 2, training=True, result_bytes=result)
    assert computed == peaks


def test_a_forward_keeps_passed_and_returned_values_to_the_end() -> None:
    sketch = Sketch()
    x = sketch.input(3)
    a = sketch.op([x], 8)
    same = sketch.op([a], 8, view_of=a)
    small = sketch.op([a], 1)
    # Its size differs from its storage: a dense copy is sent.
    spread = sketch.op([small], 24, view_of=small)
    b = sketch.op([same, spread], 2, [sketch.weight(50)])
    early = sketch.op([b], 5)
    result = sketch.op([b, same, x], 4, [sketch.weight(60)])
    this = problem(sketch.graph(early, result), devices(999, 999, 999))
    three = Assignment(np.array([0, 0, 0, 0, 1, 1, 2]), ((0,), (1,), (2,)))
    first, second, third = engine_stages(this, three)
    assert (first.held_bytes, first.sent_bytes, first.forward_peak_bytes) == (32, 32, 32)
    # The second passes on x and the 8; a result of the model goes to the last stage.
    assert (second.received_bytes, second.held_bytes, second.sent_bytes) == (3 + 8 + 24, 7, 7)
    assert (third.received_bytes, third.held_bytes, third.sent_bytes) == (3 + 8 + 2 + 5, 4, 0)
    computed = engine_peak_bytes("gpipe", (first, second, third), 5, training=False)
    assert computed == (5 * (3 + 32), 50 + 5 * (35 + 7), 60 + 5 * (18 + 4))


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 15), st.integers(1, 3))
def test_more_microbatches_never_need_less_memory(seed: int, n: int, count: int) -> None:
    this = problem(random_training_graph(seed, n), devices(*[9999] * count))
    count = min(count, stage_line(this).n_units)
    placed = make_mode("pipeline", {"stages": count})(this)
    stages, costs = engine_stages(this, placed), stage_costs(this, placed)
    assert [s.weight_bytes for s in stages] == [s.weight_bytes for s in costs.stages]
    for name in ("gpipe", "1f1b"):
        before = (0,) * count
        for microbatches in range(count, count + 4):
            peaks = engine_peak_bytes(name, stages, microbatches, training=costs.training)
            assert all(new >= old for new, old in zip(peaks, before, strict=True))
            before = peaks


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 15), st.integers(1, 3))
def test_updates_are_not_part_of_the_engine(seed: int, n: int, count: int) -> None:
    step = random_training_graph(seed, n)
    if not len(step.gradient_values):
        return
    optimizer = Optimizer("adam", master_weights=True, implementation="foreach")
    # With 2 bytes per number, so that there are casts too.
    step = replace(step, dtypes=("bfloat16",) * step.n_ops)
    whole = with_optimizer(step, optimizer)
    this = problem(whole, devices(*[9999] * count))
    count = min(count, stage_line(this).n_units)
    placed = make_mode("pipeline", {"stages": count})(this)
    plain = partition_by_device(step, placed.device_of[: step.n_ops])
    without_updates = engine_stages(problem(step, this.topology), plain)
    assert engine_stages(this, placed) == without_updates


def test_a_schedule_not_used_with_the_engine_is_refused() -> None:
    with pytest.raises(SpecError, match="gpipe and 1f1b, got schedule=interleaved; take one"):
        engine_peak_bytes("interleaved", (FIRST, SECOND), 2, training=True)
    with pytest.raises(SpecError, match="microbatches must be at least 1, got 0"):
        engine_peak_bytes("gpipe", (FIRST, SECOND), 0, training=True)
