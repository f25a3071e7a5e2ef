"""`pipeline`: cuts at module boundaries where that costs little, and loads with transfers."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.errors import SpecError
from fxpart.placement import make_mode
from fxpart.placement.stages.line import stage_line
from fxpart.placement.stages.module_cuts import cuts_by_depth
from fxpart.plan_export import split_points
from tests.placement.training_sketch import random_training_graph
from tests.sketch import Sketch, devices, problem, random_graph

FAST = Link(1e12)


def _layers(*flops: int, each: int = 3) -> OpGraph:
    """Return layers of `each` operators in submodules, and a free operator of the layer itself."""
    sketch = Sketch()
    value = sketch.input(0)
    for layer, work in enumerate(flops):
        for part in range(each):
            path = f"layers.{layer}.part{part // 2}"
            value = sketch.op([value], 1, [sketch.weight(1)], work, module=path)
        value = sketch.op([value], 1, [], 0, module=f"layers.{layer}")
    return sketch.graph(value)


def test_cuts_by_depth_begin_with_the_outermost_modules() -> None:
    graph = _layers(1, 1, each=4)
    line = stage_line(problem(graph, devices(99)))
    assert [cuts.tolist() for cuts in cuts_by_depth(graph, line.stretches)] == [
        [0, 5, 10],
        [0, 2, 4, 5, 7, 9, 10],
    ]


def test_a_cut_moves_to_a_module_boundary_if_that_costs_little() -> None:
    # 996 and 999 between the layers, or 998 and 997 inside the second one.
    sketch = Sketch()
    value = sketch.input(0)
    for layer, loads in enumerate(((995, 1), (2, 995), (2,))):
        for work in loads:
            value = sketch.op([value], 1, [], work, module=f"layers.{layer}")
    graph = sketch.graph(value)
    this = problem(graph, devices(99, 99, link=FAST))
    anywhere = make_mode("pipeline", {"boundary_gain": None})(this)
    assert split_points(graph, make_mode("pipeline")(this)) == {"layers.1": "BEGINNING"}
    assert anywhere.partition_of.tolist() == [0, 0, 0, 1, 1]
    uneven = replace(graph, flops=np.array([900, 1, 100, 994, 1]))
    this = problem(uneven, devices(99, 99, link=FAST))
    assert make_mode("pipeline")(this).partition_of.tolist() == [0, 0, 0, 1, 1]
    moved = make_mode("pipeline", {"boundary_gain": 0.2})(this)
    assert moved.partition_of.tolist() == [0, 0, 1, 1, 1]


def test_a_cut_stays_inside_a_module_if_that_saves_more() -> None:
    # One layer of six equal operators: in halves 30 each; at its parts 20 and 40.
    graph = _layers(10, each=6)
    this = problem(graph, devices(99, 99, link=FAST))
    assert np.bincount(make_mode("pipeline")(this).partition_of).tolist() == [3, 4]
    dear = make_mode("pipeline", {"boundary_gain": 0.4})(this)
    assert np.bincount(dear.partition_of).tolist() in ([2, 5], [4, 3])
    assert split_points(graph, dear)


def test_at_most_the_boundary_gain_is_lost() -> None:
    differing = 0
    for seed in range(40):
        training = seed % 2 == 0
        graph = (random_training_graph if training else random_graph)(seed, 20)
        this = problem(graph, devices(*[10**6] * 3, link=FAST))
        plans = [make_mode("pipeline", {"boundary_gain": gain})(this) for gain in (None, 0.1)]
        loads = [1 / evaluate(this, plan, search_bounds=False).throughput_per_s for plan in plans]
        assert loads[1] <= loads[0] * (1.1 + 1e-6)
        differing += loads[1] > loads[0] * (1 + 1e-9)
    assert differing > 0


def test_interleaved_stages_are_cut_at_module_boundaries() -> None:
    graph = _layers(*[10] * 8)
    this = problem(graph, devices(99, 99, link=FAST))
    placed = make_mode("pipeline", {"interleave": 2})(this)
    assert list(split_points(graph, placed)) == ["layers.2", "layers.4", "layers.6"]


@pytest.mark.parametrize("gain", [-0.1, 1.0, "much", float("nan")])
def test_an_invalid_gain_is_refused(gain: object) -> None:
    with pytest.raises(SpecError, match=r"mode\.boundary_gain must be at least 0 and below 1"):
        make_mode("pipeline", {"boundary_gain": gain})


def test_a_slow_link_moves_a_cut_to_where_few_bytes_cross() -> None:
    # In halves, 8 bytes cross in 8 s; one operator later, 1 byte does.
    sketch = Sketch()
    value = sketch.input(0)
    for size in (9, 8, 1, 9):
        value = sketch.op([value], size, [sketch.weight(1)], 2)
    graph = sketch.graph(value)
    placed = make_mode("pipeline", {"boundary_gain": None})(
        problem(graph, devices(99, 99, link=Link(1.0)))
    )
    assert placed.partition_of.tolist() == [0, 0, 0, 1]
    slow = problem(graph, devices(99, 99, link=Link(0.1)))
    assert make_mode("pipeline")(slow).n_partitions == 1


def test_with_few_microbatches_fewer_stages_make_a_shorter_step() -> None:
    graph = _layers(*[10] * 8, each=1)
    this = problem(graph, devices(*[10**6] * 4, link=Link(0.1)))
    options = {"schedule": "gpipe", "boundary_gain": None}
    # A transfer takes 10 s: one microbatch gains nothing from stages, many do.
    assert make_mode("pipeline", {**options, "microbatches": 1})(this).n_partitions == 1
    assert make_mode("pipeline", {**options, "microbatches": 64})(this).n_partitions == 4
