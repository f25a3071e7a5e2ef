"""Exact reading or search: the lower one is chosen; how often that is the exact reading."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from fxpart.errors import InfeasibleError
from fxpart.torch_compat.accounting.cost import latency_s, used_bytes
from fxpart.torch_compat.accounting.exact import exact_cost_aware, exact_kl
from fxpart.torch_compat.accounting.latency_modes import (
    COST_AWARE_EXACT_OPERATORS,
    KL_EXACT_OPERATORS,
    better,
    cost_aware,
    kl_based,
)
from fxpart.torch_compat.accounting.least_latency import least_latency
from fxpart.torch_compat.accounting.problem import StaticPlan, StaticProblem
from tests.torch_compat.accounting.graphs import chain, random_graph, random_problem, static_graph

Exact = Callable[[StaticProblem], StaticPlan | None]
Mode = Callable[[StaticProblem], StaticPlan]

BOTH = pytest.mark.parametrize(
    ("mode", "exact"), [(kl_based, exact_kl), (cost_aware, exact_cost_aware)]
)


def _problem(seed: int) -> StaticProblem:
    """Return a problem of 4 to 30 operators on 2 to 5 devices of 0.3 to 0.9 of the graph."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(4, 30), rng.choice([0.5, 1.0, 1.5]))
    whole = int(used_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 1)[0])
    devices, equal, share = rng.randint(2, 5), rng.random() < 0.5, rng.uniform(0.3, 0.9)
    shares = [share if equal else rng.uniform(0.3, 0.9) for _ in range(devices)]
    memory = np.array([max(1, int(whole * part)) for part in shares], dtype=np.int64)
    return StaticProblem(graph, memory, 10 ** rng.uniform(0, 2.5))


def _pair() -> StaticProblem:
    """Return two operators that no device holds together; apart they take 1 + 4 + 1."""
    graph = static_graph([[], [0]], total=[10, 10], output=[4, 1], seconds=[1.0, 1.0])
    return StaticProblem(graph, np.array([15, 15]), 1.0)


@BOTH
def test_the_result_is_never_above_the_exact_reading(mode: Mode, exact: Exact) -> None:
    compared = 0
    for seed in range(60):
        problem = _problem(seed)
        reading = exact(problem)
        if reading is not None:
            assert latency_s(problem, mode(problem)) <= latency_s(problem, reading) * (1 + 1e-12)
            compared += 1
    assert compared >= 40


@pytest.mark.parametrize("exact", [exact_kl, exact_cost_aware])
def test_the_search_alone_is_hardly_ever_above(exact: Exact) -> None:
    compared, above = 0, []
    for seed in range(300):
        problem = _problem(seed)
        reading = exact(problem)
        if reading is None:
            continue
        compared += 1
        ratio = latency_s(problem, least_latency(problem)) / latency_s(problem, reading)
        above += [(seed, ratio)] if ratio > 1 + 1e-12 else []
    assert compared >= 200
    assert len(above) <= 3, above
    assert all(ratio < 1.2 for _, ratio in above), above


def test_the_lower_latency_is_chosen() -> None:
    slow = StaticPlan(np.array([0, 0, 1]), ((0,), (1,)))
    fast = StaticPlan(np.array([0, 1, 1]), ((0,), (1,)))
    graph = static_graph([[], [0], [1]], total=[10] * 3, output=[1, 9, 1], seconds=[1.0] * 3)
    problem = StaticProblem(graph, np.array([30, 30]), 1.0)
    assert (latency_s(problem, slow), latency_s(problem, fast)) == (12, 4)
    assert latency_s(problem, better(problem, lambda _: slow)) == 3


def test_an_exact_plan_with_less_latency_is_kept() -> None:
    # As if the search were worse: this plan overfills a device, so no search may return it.
    problem = _pair()
    together = StaticPlan(np.array([0, 0]), ((0,),))
    assert better(problem, lambda _: together) is together


def test_of_equal_plans_the_one_with_fewer_partitions_is_chosen() -> None:
    graph = static_graph([[], [0], [1]], total=[10] * 3, output=[1] * 3, seconds=[1.0] * 3)
    problem = StaticProblem(graph, np.array([100]), 1.0)
    three = StaticPlan(np.arange(3), ((0,), (0,), (0,)))
    assert better(problem, lambda _: three).partition_of.tolist() == [0, 0, 0]


def test_of_plans_with_equal_partitions_the_exact_one_is_chosen() -> None:
    problem = _pair()
    swapped = StaticPlan(np.array([0, 1]), ((1,), (0,)))
    plan = StaticPlan(np.array([0, 1]), ((0,), (1,)))
    assert better(problem, lambda _: swapped) is swapped
    assert better(problem, lambda _: plan) is plan


def test_the_exact_plan_is_used_if_the_search_finds_none() -> None:
    problem = StaticProblem(_pair().graph, np.array([9, 9]), 1.0)
    plan = StaticPlan(np.array([0, 1]), ((0,), (1,)))
    assert better(problem, lambda _: plan) is plan
    with pytest.raises(InfeasibleError, match="too large to fit any device"):
        better(problem, lambda _: None)


@pytest.mark.parametrize(
    ("mode", "exact", "most"),
    [
        (kl_based, exact_kl, KL_EXACT_OPERATORS),
        (cost_aware, exact_cost_aware, COST_AWARE_EXACT_OPERATORS),
    ],
)
def test_large_graphs_skip_the_exact_reading(
    mode: Mode, exact: Exact, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def noted(problem: StaticProblem) -> StaticPlan | None:
        sizes.append(problem.graph.n_ops)
        return exact(problem)

    monkeypatch.setattr(f"{mode.__module__}.{exact.__name__}", noted)
    for n in (most, most + 1):
        memory = np.array([int(chain(n).total_bytes.sum() * 0.8)] * 2)
        mode(StaticProblem(chain(n), memory, 25.0))
    assert sizes == [most]


def test_the_two_modes_differ_where_the_readings_do() -> None:
    problems = [random_problem(seed, most_ops=12) for seed in range(60)]
    plans = list[tuple[list[int], list[int]]]()
    for problem in problems:
        try:
            plans.append(
                (kl_based(problem).partition_of.tolist(), cost_aware(problem).partition_of.tolist())
            )
        except InfeasibleError:
            continue
    assert any(first != second for first, second in plans)
