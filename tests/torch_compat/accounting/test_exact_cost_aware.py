"""The exact reading of cost_aware: torch's own result, and examples worked by hand."""

import numpy as np
import pytest

from fxpart.torch_compat.accounting.cost import latency_s
from fxpart.torch_compat.accounting.exact import exact_cost_aware
from fxpart.torch_compat.accounting.problem import StaticProblem
from tests.torch_compat.accounting.graphs import random_problem, static_graph
from tests.torch_compat.accounting.torch_side import torch_result

Parts = list[tuple[list[int], list[int]]]
"""Operators and devices of each partition, in order."""


def _ours(problem: StaticProblem) -> Parts | None:
    plan = exact_cost_aware(problem)
    if plan is None:
        return None
    return [
        (np.flatnonzero(plan.partition_of == index).tolist(), list(homes))
        for index, homes in enumerate(plan.devices_of_partition)
    ]


def _theirs(problem: StaticProblem) -> Parts | None:
    """Return torch's partitions, or None if one has no device."""
    side, partitions = torch_result(problem, "cost_aware")
    if not all(partition.logical_device_ids for partition in partitions):
        return None
    index_of = {node: index for index, node in enumerate(side.ops)}
    return [
        (sorted(index_of[node] for node in p.nodes if node in index_of), p.logical_device_ids)
        for p in partitions
    ]


@pytest.mark.parametrize("seed", range(60))
def test_partitions_and_devices_equal_those_of_torch(seed: int) -> None:
    problem = random_problem(seed, most_ops=10)
    assert _ours(problem) == _theirs(problem)


def test_the_cases_include_results_and_failures_of_torch() -> None:
    whole = [exact_cost_aware(random_problem(seed, most_ops=10)) is not None for seed in range(60)]
    assert whole.count(True) >= 30
    assert whole.count(False) >= 5


def test_a_chain_on_one_device_becomes_one_partition() -> None:
    graph = static_graph([[], [0], [1]], total=[10] * 3, output=[5] * 3, seconds=[1.0] * 3)
    problem = StaticProblem(graph, np.array([31]), 1.0)
    assert _ours(problem) == [([0, 1, 2], [0])]


def test_a_chain_is_merged_where_the_most_bytes_cross() -> None:
    # Each device holds two operators and the 3 bytes between 1 and 2. First 2 and 3 are
    # merged, between which 50 bytes cross, then 0 and 1; all four fit nowhere.
    graph = static_graph(
        [[], [0], [1], [2]], total=[60] * 4, output=[7, 3, 50, 1], seconds=[1.0] * 4
    )
    problem = StaticProblem(graph, np.array([130, 130]), 1.0)
    plan = exact_cost_aware(problem)
    assert plan is not None
    assert plan.partition_of.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert latency_s(problem, plan) == 4 + 3


def test_without_devices_there_is_no_result() -> None:
    # The two cannot be merged, as no device holds both, and one of them fits on none.
    graph = static_graph([[], []], total=[10, 10], output=[1, 1], seconds=[1.0, 1.0])
    assert exact_cost_aware(StaticProblem(graph, np.array([15, 5]), 1.0)) is None


def test_one_operator_gets_a_device() -> None:
    # Torch ends before it searches for one.
    graph = static_graph([[]], total=[10], output=[1], seconds=[1.0])
    assert _ours(StaticProblem(graph, np.array([5, 15]), 1.0)) == [([0], [1])]


def test_the_plan_is_deterministic() -> None:
    problem = random_problem(3, most_ops=12)
    assert _ours(problem) == _ours(problem)
