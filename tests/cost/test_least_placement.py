"""The best of all placements, against enumeration with an independent count."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import fxpart.cost.least_placement
from benchmarks.random_problems import brute_force, random_problem
from fxpart.core.partitions import partition_by_device
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.evaluate import evaluate
from fxpart.cost.least_placement import least_placement
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from tests import independent
from tests.sketch import Sketch, chain, devices
from tests.sketch import problem as problem_on

SEEDS = [seed for seed in range(60) if random_problem(seed).graph.n_ops < 6]


def _least_s(task: Problem) -> dict[str, float]:
    """Return the minimum latency and load of the placements that fit; empty if none does."""
    graph, count = task.graph, task.topology.n_devices
    values: dict[str, list[float]] = {objective: [] for objective in BY_TIME}
    firsts = np.unique(graph.group)
    for homes in itertools.product(range(count), repeat=len(firsts)):
        device_of = np.empty(graph.n_ops, dtype=np.int64)
        device_of[firsts] = homes
        device_of = device_of[graph.group]
        peaks = [independent.peak_bytes(graph, device_of, device) for device in range(count)]
        if (np.array(peaks) <= task.topology.memory_bytes).all():
            evaluation = evaluate(task, partition_by_device(graph, device_of))
            values["latency"].append(independent.latency_s(task, device_of))
            values["throughput"].append(evaluation.load_s)
    return {objective: min(seconds) for objective, seconds in values.items() if seconds}


def test_modes_and_bounds_are_exact_for_few_placements() -> None:
    refused = better = 0
    for seed in SEEDS:
        task = random_problem(seed)
        optimum = _least_s(task)
        for objective, mode in itertools.product(BY_TIME, ("kl_based", "cost_aware", "optimal")):
            variant = replace(task, objective=objective)
            if not optimum:
                refused += 1
                with pytest.raises(InfeasibleError):
                    make_mode(mode)(variant)
                continue
            evaluation = evaluate(variant, make_mode(mode)(variant))
            values = {"latency": evaluation.latency_s, "throughput": evaluation.load_s}
            assert values[objective] == pytest.approx(optimum[objective], rel=1e-9)
            assert evaluation.lower_bound_s == pytest.approx(optimum["latency"], rel=1e-9)
            assert evaluation.load_bound_s == pytest.approx(optimum["throughput"], rel=1e-9)
            better += evaluation.lower_bound_s > lower_bound_s(task) * (1 + 1e-9)
    assert 0 < refused < 6 * len(SEEDS)
    assert better


def test_branch_and_bound_equals_brute_force_for_many_placements() -> None:
    """10 operators on up to 3 devices with tight memory: up to 59,049 placements each."""
    solvable = 0
    tasks = [random_problem(seed, operators=10) for seed in range(18)]
    tasks = [task for task in tasks if task.topology.n_devices <= 3]
    for task in tasks:
        optimum = brute_force(task)
        solvable += np.isfinite(optimum["latency"])
        for objective in BY_TIME:
            result = least_placement(task, objective)
            assert result is not None
            assert result.is_proven
            assert result.bound_s == pytest.approx(optimum[objective], rel=1e-9)
    assert 3 < solvable < len(tasks)


def test_an_unfinished_search_returns_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few steps, the minimum over the open nodes is below the optimum."""
    task = random_problem(2, operators=10)
    optimum, raised = brute_force(task), 0
    monkeypatch.setattr(fxpart.cost.least_placement, "_NODES_A_UNIT", 0)
    for work in (1_000, 3_000, 10_000, 30_000):
        monkeypatch.setattr(fxpart.cost.least_placement, "_MOST_WORK", work)
        for objective in BY_TIME:
            result = least_placement.__wrapped__(task, objective)
            assert result is not None
            assert result.bound_s <= optimum[objective] * (1 + 1e-9)
            raised += not result.is_proven and result.bound_s > 0
    assert raised


def test_many_operators_or_devices_are_not_enumerated() -> None:
    assert least_placement(problem_on(chain(41), devices(1000, 1000)), "latency") is None
    assert least_placement(problem_on(chain(9), devices(*[1000] * 2000)), "latency") is None
    assert least_placement(problem_on(chain(40), devices(1000, 1000)), "latency") is not None


def test_separation_forced_by_memory_is_proven_for_many_operators() -> None:
    """For 26 operators, the formulas prove less than half of the best plan."""
    task = random_problem(4, operators=26)
    evaluation = evaluate(task, make_mode("kl_based")(task))
    assert evaluation.latency_s == pytest.approx(evaluation.lower_bound_s, rel=1e-9)
    assert lower_bound_s(task) < evaluation.latency_s / 2


@pytest.mark.parametrize("mode", ["size_based", "kl_based", "cost_aware"])
def test_weights_that_no_operator_uses_need_no_memory(mode: str) -> None:
    sketch = Sketch()
    sketch.weight(1000)
    value = sketch.input(0)
    for _ in range(20):
        value = sketch.op([value], 1, [sketch.weight(10)], 1)
    task = problem_on(sketch.graph(value), devices(110, 110))
    assert set(make_mode(mode)(task).device_of.tolist()) == {0, 1}
