"""The search for the minimum latency: optimal for small graphs, against torch, and deep graphs."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from torch.fx.experimental.accelerator_partitioner import check_dependency

from fxpart.core.graph import IntArray
from fxpart.errors import InfeasibleError
from fxpart.torch_compat.accounting.cost import latency_s, used_bytes
from fxpart.torch_compat.accounting.latency_modes import cost_aware, kl_based
from fxpart.torch_compat.accounting.least_latency import least_latency
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticPlan, StaticProblem
from fxpart.torch_compat.accounting.size_based import size_based
from tests.torch_compat.accounting.graphs import chain, diamonds, random_problem, static_graph
from tests.torch_compat.accounting.torch_side import (
    has_answer,
    torch_latency_s,
    torch_partitions,
    torch_result,
)

SAME = 1 + 1e-12
"""Sums in another order differ in the last bits."""


def _devices(plan: StaticPlan) -> IntArray:
    homes = np.array([homes[0] for homes in plan.devices_of_partition], dtype=np.int64)
    return homes[plan.partition_of]


def _slowly(problem: StaticProblem, device_of: tuple[int, ...]) -> float:
    """Return the longest path over operators, by direct computation."""
    graph, ends = problem.graph, list[float]()
    contents = [
        set(graph.sources[a:b].tolist()) for a, b in itertools.pairwise(graph.source_start.tolist())
    ]
    for op in range(graph.n_ops):
        ready = [0.0]
        for maker in graph.reads[graph.read_start[op] : graph.read_start[op + 1]].tolist():
            passed = 0
            if device_of[maker] != device_of[op]:
                common = sorted(contents[op] & contents[maker])
                passed = graph.output_bytes[maker] + graph.source_bytes[common].sum()
            ready.append(ends[maker] + passed / problem.bytes_per_s)
        ends.append(max(ready) + float(graph.latency_s[op]))
    return max(ends)


def _optimum(problem: StaticProblem) -> float | None:
    """Return the minimum latency of all placements that fit, or None."""
    devices = len(problem.memory_bytes)
    fitting = [
        device_of
        for device_of in itertools.product(range(devices), repeat=problem.graph.n_ops)
        if (used_bytes(problem.graph, np.array(device_of), devices) <= problem.memory_bytes).all()
    ]
    return min((_slowly(problem, device_of) for device_of in fitting), default=None)


def _check(problem: StaticProblem, plan: StaticPlan) -> float:
    """Check that a plan is valid, and return its latency."""
    count = len(plan.devices_of_partition)
    assert sorted(set(plan.partition_of.tolist())) == list(range(count))
    assert all(len(homes) == 1 for homes in plan.devices_of_partition)
    used = used_bytes(problem.graph, _devices(plan), len(problem.memory_bytes))
    assert (used <= problem.memory_bytes).all()
    return latency_s(problem, plan)


@pytest.mark.parametrize("seed", range(40))
def test_small_graphs_reach_the_optimum(seed: int) -> None:
    problem = random_problem(seed, most_ops=6, most_devices=3)
    best = _optimum(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            kl_based(problem)
        return
    plan = kl_based(problem)
    assert _check(problem, plan) == pytest.approx(best, rel=1e-12)
    assert latency_s(problem, plan) == pytest.approx(_slowly(problem, tuple(_devices(plan))))


@pytest.mark.parametrize("mode", ["kl_based", "cost_aware"])
@pytest.mark.parametrize("seed", range(40))
def test_the_result_is_never_slower_than_torch(seed: int, mode: str) -> None:
    problem = random_problem(seed, most_ops=12)
    try:
        side, theirs = torch_result(problem, mode)
    except RuntimeError:
        theirs = []
    if not theirs or not has_answer(side, theirs, problem):
        return
    plan = {"kl_based": kl_based, "cost_aware": cost_aware}[mode](problem)
    _check(problem, plan)
    ours = torch_partitions(side, plan.partition_of, plan.devices_of_partition)
    assert not any(check_dependency(partition) for partition in ours)
    torch_s = torch_latency_s(side, theirs, problem.bytes_per_s)
    assert torch_latency_s(side, ours, problem.bytes_per_s) <= torch_s * SAME


def test_the_cases_include_answers_of_torch() -> None:
    answers = 0
    for seed in range(40):
        problem = random_problem(seed, most_ops=12)
        try:
            side, partitions = torch_result(problem, "cost_aware")
        except RuntimeError:
            continue
        answers += has_answer(side, partitions, problem)
    assert answers >= 20


@pytest.mark.parametrize("seed", range(30))
def test_the_result_is_never_slower_than_size_based(seed: int) -> None:
    problem = random_problem(seed, most_ops=40)
    try:
        start = size_based(problem)
    except InfeasibleError:
        return
    assert _check(problem, kl_based(problem)) <= latency_s(problem, start) * SAME


def test_a_chain_is_cut_where_the_fewest_bytes_cross() -> None:
    graph = static_graph(
        [[], [0], [1], [2]],
        total=[50, 50, 50, 50],
        output=[40, 3, 7, 40],
        seconds=[1.0] * 4,
    )
    plan = kl_based(StaticProblem(graph, np.array([160, 160]), 1.0))
    assert plan.partition_of.tolist() == [0, 0, 1, 1]
    assert latency_s(StaticProblem(graph, np.array([160, 160]), 1.0), plan) == 4 + 3


def test_side_branches_move_away_for_free() -> None:
    # Operator 1 is so quick that its transfers delay nothing, so the long path stays together.
    graph = static_graph(
        [[], [0], [0], [2], [1, 3]],
        total=[10, 90, 10, 10, 10],
        output=[10] * 5,
        seconds=[1.0, 1.0, 50.0, 50.0, 1.0],
    )
    problem = StaticProblem(graph, np.array([60, 120]), 1.0)
    plan = cost_aware(problem)
    assert _check(problem, plan) == 102
    device = _devices(plan)
    assert len(set(device[[0, 2, 3, 4]])) == 1
    assert device[1] != device[0]


def test_the_plan_is_deterministic() -> None:
    problem = random_problem(5, most_ops=40)
    first, second = least_latency(problem), least_latency(problem)
    assert first.partition_of.tolist() == second.partition_of.tolist()
    assert first.devices_of_partition == second.devices_of_partition


def test_an_operator_larger_than_all_devices_is_named() -> None:
    problem = StaticProblem(chain(3), np.array([20, 30]), 1.0)
    with pytest.raises(InfeasibleError, match=r"op_\d is too large .* largest device has 30;"):
        kl_based(problem)


def test_a_graph_larger_than_the_devices_is_refused() -> None:
    graph = static_graph([[] for _ in range(3)], total=[10] * 3, output=[1] * 3, seconds=[1.0] * 3)
    with pytest.raises(InfeasibleError, match=r"needs 30 bytes .* 28 in all; give more memory"):
        cost_aware(StaticProblem(graph, np.array([14, 14]), 1.0))


def test_a_plan_is_found_if_graph_order_does_not_fit() -> None:
    # Filled in graph order, the last operator of 6 does not fit; exchanged, all fit exactly.
    graph = static_graph(
        [[] for _ in range(4)], total=[4, 4, 6, 6], output=[1] * 4, seconds=[1.0] * 4
    )
    problem = StaticProblem(graph, np.array([10, 10]), 1.0)
    assert _check(problem, cost_aware(problem)) == 1


@pytest.mark.parametrize(("kind", "size", "most"), [(chain, 20_000, 4), (diamonds, 3_000, 20)])
def test_deep_graphs_have_few_partitions(
    kind: Callable[[int], StaticGraph], size: int, most: int
) -> None:
    graph = kind(size)
    whole = int(used_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 1)[0])
    problem = StaticProblem(graph, np.array([whole * 2 // 5] * 4), 25.0)
    plan = kl_based(problem)
    single = StaticPlan(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    assert _check(problem, plan) <= latency_s(problem, single) + 2 * 60 / 25
    assert len(plan.devices_of_partition) <= most
