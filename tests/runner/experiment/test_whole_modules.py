"""Which tools can carry out a plan, and the plan of whole modules beside a search."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.placement import make_mode
from fxpart.placement.search.refine import latency_of
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.experiment.whole_modules import (
    carrier_line,
    whole_line,
    whole_metrics,
    whole_modules,
)
from tests.plan_export.scene import named
from tests.runner.command import OWN
from tests.runner.composed import read
from tests.sketch import Sketch, devices, problem


def _branches(blocks: int) -> OpGraph:
    """Return blocks of two branches that take equally long, and a sum in each block."""
    sketch = Sketch()
    value, names = sketch.input(1), list[str]()
    for block in range(blocks):
        sides = []
        for side in ("left", "right"):
            weight = sketch.weight(10)
            names.append(f"block.{block}.{side}.weight")
            path = f"block.{block}.{side}"
            sides.append(sketch.op([value], 1, [weight], 10, module=path))
        value = sketch.op(sides, 1, [], 1, module=f"block.{block}")
    return named(sketch.graph(value), *names)


@pytest.mark.parametrize("mode", ["kl_based", "optimal"])
def test_a_search_reports_the_best_plan_of_whole_modules_and_its_cost(mode: str) -> None:
    this = problem(_branches(4), devices(10**6, 10**6, link=Link(10.0)))
    place = make_mode(mode)
    best = place(this)
    whole = whole_modules(read(f"mode={mode}"), this, best, place)
    assert whole is not None
    # Side by side 4 x 11 s and transfers; whole blocks run one after the other.
    assert whole.latency_s == pytest.approx(4 * 21)
    best_s = latency_of(this, best.device_of)
    assert best_s < 60
    assert whole.more == pytest.approx(84 / best_s - 1)
    assert whole.carriers.accelerate
    assert whole.granularity == "2"
    assert whole_metrics(whole) == {
        "whole_modules_ms": pytest.approx(84e3),
        "whole_modules_pct": pytest.approx(100 * (84 / best_s - 1)),
    }
    assert whole_line(whole).endswith("with modules whole, by granularity=2")


def test_a_plan_of_whole_modules_is_its_own_and_other_modes_report_none() -> None:
    # Over a slow link, everything stays on one device.
    this = problem(_branches(2), devices(10**6, 10**6, link=Link(1e-3)))
    place = make_mode("cost_aware")
    best = place(this)
    whole = whole_modules(read("mode=cost_aware"), this, best, place)
    assert whole is not None
    assert (whole.granularity, whole.more) == ("operator", 0.0)
    assert whole_line(whole) == "this plan divides no module"
    for other in ("mode=size_based", "granularity=module", "context_parallel=2"):
        assert whole_modules(read(other), this, best, place) is None


def test_modules_too_large_for_any_device_are_not_kept_whole() -> None:
    # A block needs 20 bytes of weights: 22 bytes hold its halves only in turn.
    graph = _branches(3)
    this = problem(graph, devices(*[19] * 6, link=Link(10.0)))
    place = make_mode("kl_based")
    whole = whole_modules(read("mode=kl_based"), this, place(this), place)
    assert whole is not None
    assert (whole.granularity, whole.more) == ("3", 0.0)
    assert whole.carriers.torn == ("block.0", "block.1", "block.2")


def _planned(*overrides: str) -> tuple[Result, str]:
    config = read(*OWN, "+model.factory_args.layers=4", "devices=2x16gb", *overrides)
    result = plan(config, model_spec(config))
    return result, carrier_line(config, result.problem, result.assignment, result.whole)


def test_each_result_names_the_tools_that_can_carry_it_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, line = _planned("mode=single")
    assert line == "plain PyTorch, everything is on one device, execute=local"
    result, line = _planned("mode=pipeline", "mode.stages=2")
    assert line == (
        "accelerate (device_map.json), torch pipelining (split_points.json), execute=local"
    )
    late = ("phase=training", "optimizer=none", "backward_order=late_weight_gradients")
    _, line = _planned("mode=single", *late)
    assert line.startswith("execute=local (add phase.train_mode=false), a zero-bubble schedule")
    stages = ("mode=pipeline", "mode.stages=2", "phase=training")
    _, line = _planned(*stages, "schedule=1f1b", "microbatches=4")
    assert line == (
        "torch pipelining (split_points.json),"
        " execute=pipeline (add optimizer=none phase.train_mode=false)"
    )
    copied, line = _planned("mode=size_based", "devices.saturate_host=true")
    turns = "nothing yet: inputs take turns on replicas"
    assert line == f"{turns}; leave out devices.saturate_host=true"
    line = carrier_line(read("mode=sparse_nn"), copied.problem, copied.assignment, None)
    assert line == f"{turns}; mode=sparse_nn makes them"
    inside = replace(result.problem, graph=_in_one_module(result.problem.graph))
    config = read("mode=pipeline", "mode.stages=2")
    line = carrier_line(config, inside, result.assignment, None)
    assert line == "execute=local; a stage begins inside net"  # as does each module
    graph, n = inside.graph, inside.graph.n_ops
    two = replace(inside, graph=replace(graph, modules=("a",) * (n // 2) + ("b",) * (n - n // 2)))
    early = partition_by_device(graph, np.minimum(np.arange(n), 1))
    line = carrier_line(config, two, early, None)
    assert line.endswith("mode.boundary_gain=0.2 finds cuts at modules")
    line = carrier_line(read("mode=size_based"), inside, result.assignment, None)
    assert line.startswith("execute=local; accelerate would run 4 operators elsewhere than planned")


def test_a_plan_that_cuts_through_modules_names_the_setting_to_add() -> None:
    this = problem(_branches(4), devices(10**6, 10**6, link=Link(10.0)))
    place, config = make_mode("kl_based"), read("mode=kl_based")
    best = place(this)
    whole = whole_modules(config, this, best, place)
    line = carrier_line(config, this, best, whole)
    assert line == "execute=local; 4 modules are cut through; add granularity=2 for accelerate"
    kept = make_mode("size_based")(problem(_branches(4), devices(45, 45, link=Link(10.0))))
    assert carrier_line(config, this, kept, None).startswith("accelerate (device_map.json)")


def _in_one_module(graph: OpGraph) -> OpGraph:
    weights = tuple(f"net.{name.replace('.', '_')}" for name in graph.weight_names)
    return replace(graph, modules=("net",) * graph.n_ops, weight_names=weights)
