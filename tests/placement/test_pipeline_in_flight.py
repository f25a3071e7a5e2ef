"""`pipeline` for a schedule: the memory of micro-batches in flight, against the simulated step."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import IMPLEMENTATIONS, Optimizer, with_optimizer
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.stages.contiguous import Slots, StageSolver
from fxpart.placement.stages.line import stage_line
from fxpart.placement.stages.step_plan import StepMemory, StepPlan
from fxpart.placement.stages.stretch_bytes import Flight
from fxpart.schedule import simulate_schedule, stage_costs
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem, random_graph

SEEDS = st.integers(0, 10_000)


def _graph(seed: int, n: int) -> OpGraph:
    """Return a forward pass, a training step, or one with updates of some kind."""
    if seed % 5 == 0:
        return random_graph(seed, n)
    graph = random_training_graph(seed, n)
    if seed % 5 == 1 or not len(graph.gradient_values):
        return graph
    kind = IMPLEMENTATIONS[seed % 5 - 2]
    return with_optimizer(graph, Optimizer("adam", implementation=kind))


@settings(max_examples=80)
@given(SEEDS, st.integers(2, 14), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))
def test_the_memory_of_devices_is_that_of_the_schedule(
    seed: int, n: int, count: int, chunks: int, rounds: int
) -> None:
    this = problem(_graph(seed, n), devices(*[9999] * count))
    line = stage_line(this)
    stages = count * chunks
    assume(stages <= line.n_units)
    rng = np.random.default_rng(seed)
    inner = np.sort(rng.choice(np.arange(1, line.n_units), size=stages - 1, replace=False))
    cuts = np.array([0, *inner, line.n_units], dtype=np.int64)
    homes = [stage % count for stage in range(stages)]
    # Adjacent stages on one device are a single stage to the schedule.
    assume(count > 1 or chunks == 1)
    placed = partition_by_device(this.graph, line.of_operators(cuts, homes))
    if this.graph.first_backward == this.graph.n_ops:
        # Partitions of the backward may merge stages; without one, each is a partition.
        numbers = line.of_operators(cuts, range(stages))
        placed = Assignment(numbers, tuple((home,) for home in homes))
    costs, microbatches = stage_costs(this, placed), rounds * count
    slots = Slots(homes, [9999] * stages, may_skip=False)
    solver = StageSolver(line, slots)
    for name in ("interleaved", "gpipe", "1f1b")[: 1 if chunks > 1 else 3]:
        plan = StepPlan(name, microbatches)
        simulated = simulate_schedule(name, costs, microbatches)
        peaks = StepMemory(this, line, homes, plan).peak_bytes(cuts)
        assert peaks.tolist() == list(simulated.peak_bytes)
        if chunks > 1:
            continue
        # The search counts no less, and more only by results that do not exist yet.
        flights = plan.flights(count, training=costs.training)
        in_turn = StageSolver(line, Slots(homes, [9999] * count, False, flights))
        for stage, (begin, end) in enumerate(itertools.pairwise(cuts.tolist())):
            needed_bytes = in_turn.peak_bytes(begin, end, stage)
            early = (microbatches - 1) * solver.stage_bytes(begin, end).outputs
            assert (
                simulated.peak_bytes[stage] <= needed_bytes <= simulated.peak_bytes[stage] + early
            )


def _layers(count: int) -> OpGraph:
    """Return layers that each save 10 bytes for a backward of as many operators."""
    sketch = Sketch()
    value, saved = sketch.input(0), []
    for _ in range(count):
        value = sketch.op([value], 10, [], 1)
        saved.append(value)
    gradient = sketch.op([value], 0, [], 0, backward_of=count - 1)
    for op in reversed(range(count)):
        gradient = sketch.op([gradient, saved[op]], 0, [], 1, backward_of=op)
    return sketch.graph(gradient)


def test_micro_batches_in_flight_move_the_cut_by_hand() -> None:
    # Six layers on two devices: without them, three and three are the most even.
    this = problem(_layers(6), devices(60, 60, link=Link(1e9)))
    line = stage_line(this)

    def first_stage(options: dict[str, object]) -> int:
        placed = make_mode("pipeline", {"stages": 2, **options})(this)
        return int((placed.device_of[: this.graph.first_backward] == 0).sum())

    assert line.n_units == 6
    assert first_stage({}) == 3
    # In 1F1B the first device holds two micro-batches at once: 2 x 3 x 10 is its memory. The second
    # one has 10 received and 3 x 10 computed, once.
    assert first_stage({"schedule": "1f1b", "microbatches": 8}) == 3
    this = problem(_layers(6), devices(50, 60, link=Link(1e9)))
    assert first_stage({}) == 3
    assert first_stage({"schedule": "1f1b", "microbatches": 8}) == 2
    # GPipe has all of them in flight on both.
    with pytest.raises(InfeasibleError, match="no cut of the model into 2 stages was found"):
        first_stage({"schedule": "gpipe", "microbatches": 8})
    with pytest.raises(InfeasibleError, match="need"):
        make_mode("pipeline", {"cut_after": ["op2"], "schedule": "gpipe", "microbatches": 8})(
            problem(_named(_layers(6)), devices(60, 60))
        )


def _named(graph: OpGraph) -> OpGraph:
    return replace(graph, modules=tuple(graph.names[op] for op in graph.forward_of.tolist()))


@settings(max_examples=80)
@given(
    SEEDS,
    st.integers(2, 14),
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2)]),
    st.sampled_from([(1, 1), (2, 2), (2, 4), (2, 6), (3, 3), (3, 6)]),
    st.floats(0.5, 3.0),
)
def test_a_placement_for_a_schedule_fits_it(
    seed: int, n: int, way: tuple[str, int], sizes: tuple[int, int], share: float
) -> None:
    (name, interleave), (count, microbatches) = way, sizes
    graph = _graph(seed, n)
    single_stage = stage_costs(problem(graph, devices(9)), _whole(graph))
    whole = simulate_schedule("gpipe", single_stage, microbatches).peak_bytes[0]
    size = max(1, int(whole * share / count))
    this = problem(graph, devices(*[size] * count))
    if stage_line(this).n_units < interleave * count:
        return
    options = {"schedule": name, "microbatches": microbatches, "interleave": interleave}
    try:
        placed = make_mode("pipeline", {"stages": count * interleave, **options})(this)
    except InfeasibleError:
        assert share < 2.5 * count
        return
    if count == 1 and interleave > 1:
        return
    peaks = simulate_schedule(name, stage_costs(this, placed), microbatches).peak_bytes
    assert max(peaks) <= size


def _whole(graph: OpGraph) -> Assignment:
    return partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))


def test_updates_count_once_per_step() -> None:
    graph = random_training_graph(7, 10)
    assert len(graph.gradient_values)
    this = problem(with_optimizer(graph, Optimizer("adam")), devices(9999))
    updates_s = float(this.costs.op_time_s[this.graph.is_update, 0].sum())
    assert updates_s > 0
    once, fourth = (stage_line(this, m).load_before_s[0, -1] for m in (1, 4))
    assert once - fourth == pytest.approx(0.75 * updates_s)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("none", [(1, 1)] * 3), ("gpipe", [(5, 5)] * 3), ("1f1b", [(5, 3), (5, 2), (5, 1)])],
)
def test_the_number_of_micro_batches_in_flight(name: str, expected: list[tuple[int, int]]) -> None:
    plan = StepPlan(name, 1 if name == "none" else 5)
    assert plan.flights(3, training=True) == [Flight(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1fb1"}, "mode.schedule=1fb1 does not exist; nearest: 1f1b"),
        (
            {"schedule": "gpipe", "microbatches": 0},
            ("mode.microbatches must be a whole number, 1 or more"),
        ),
        ({"microbatches": 4}, "mode.microbatches=4 needs a schedule; add"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_mode("pipeline", options)


def test_updates_before_the_end_of_a_step_are_refused() -> None:
    graph = _layers(2)
    targets = list(graph.targets)
    targets[3] = "optimizer.sgd"
    with pytest.raises(SpecError, match="operator op3 does not"):
        stage_line(problem(replace(graph, targets=tuple(targets)), devices(9)))
