"""The best of all placements, against one placement after the other by an independent count."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.random_problems import random_problem
from fxpart.core.partitions import partition_by_device
from fxpart.cost.all_placements import best_of_all
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from tests import independent
from tests.sketch import Sketch, chain, devices
from tests.sketch import problem as problem_on

SEEDS = [seed for seed in range(60) if random_problem(seed).graph.n_ops < 6]


def _least_s(task: Problem) -> dict[str, float]:
    """Return the least latency and load of the placements that fit; empty where none does."""
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


def test_modes_and_bounds_are_exact_where_there_are_few_placements() -> None:
    refused = better = 0
    for seed in SEEDS:
        task = random_problem(seed)
        least = _least_s(task)
        for objective, mode in itertools.product(BY_TIME, ("kl_based", "cost_aware", "optimal")):
            asked = replace(task, objective=objective)
            if not least:
                refused += 1
                with pytest.raises(InfeasibleError):
                    make_mode(mode)(asked)
                continue
            evaluation = evaluate(asked, make_mode(mode)(asked))
            values = {"latency": evaluation.latency_s, "throughput": evaluation.load_s}
            assert values[objective] == pytest.approx(least[objective], rel=1e-9)
            assert evaluation.lower_bound_s == pytest.approx(least["latency"], rel=1e-9)
            assert evaluation.load_bound_s == pytest.approx(least["throughput"], rel=1e-9)
            better += evaluation.lower_bound_s > lower_bound_s(task) * (1 + 1e-9)
    assert 0 < refused < 6 * len(SEEDS)
    assert better


def test_where_there_are_many_placements_they_are_not_looked_at() -> None:
    assert best_of_all(problem_on(chain(18), devices(1000, 1000))) is None
    assert best_of_all(problem_on(chain(17), devices(1000, 1000))) is not None


@pytest.mark.parametrize("mode", ["size_based", "kl_based", "cost_aware"])
def test_weights_that_no_operator_uses_need_no_room(mode: str) -> None:
    sketch = Sketch()
    sketch.weight(1000)
    value = sketch.input(0)
    for _ in range(20):
        value = sketch.op([value], 1, [sketch.weight(10)], 1)
    task = problem_on(sketch.graph(value), devices(110, 110))
    assert set(make_mode(mode)(task).device_of.tolist()) == {0, 1}
