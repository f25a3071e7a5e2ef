"""Latency of a plan: by hand, and bit for bit as predicted by torch's own functions."""

import random

import numpy as np
import pytest
from torch.fx.experimental.accelerator_partitioner import check_dependency

from fxpart.errors import CycleError, SpecError
from fxpart.torch_compat.accounting.cost import latency_s
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticPlan, StaticProblem
from tests.torch_compat.accounting.graphs import chain, diamonds, random_problem, static_graph
from tests.torch_compat.accounting.torch_side import torch_latency_s, torch_partitions, torch_side


def _diamond() -> StaticGraph:
    """Return 0 read by 1 and 2, both read by 3; operators 0 and 1 read a source of 30 bytes."""
    return static_graph(
        [[], [0], [0], [1, 2]],
        total=[10, 20, 40, 80],
        output=[10, 20, 40, 80],
        seconds=[1.0, 2.0, 3.0, 4.0],
        sources=[[0], [0], [], []],
        source_bytes=[30],
    )


def _latency(graph: StaticGraph, part: list[int], homes: list[int], rate: float = 10.0) -> float:
    problem = StaticProblem(graph, np.array([1000, 1000]), rate)
    return latency_s(problem, StaticPlan(np.array(part), tuple((home,) for home in homes)))


def test_one_partition_takes_its_critical_path() -> None:
    assert _latency(_diamond(), [0, 0, 0, 0], [0]) == 1 + 3 + 4


def test_a_transfer_takes_the_output_and_the_common_source() -> None:
    # From 0: its 10 bytes, and the source of 30 that operators 0 and 1 both read.
    assert _latency(_diamond(), [0, 1, 1, 1], [0, 1]) == 1 + (10 + 30) / 10 + 3 + 4


def test_a_value_read_by_two_operators_is_sent_once() -> None:
    assert _latency(_diamond(), [0, 0, 0, 1], [0, 1]) == 1 + 3 + (20 + 40) / 10 + 4
    assert _latency(_diamond(), [0, 1, 2, 2], [0, 1, 1]) == 1 + 4 + 2 + (3 + 4)


def test_transfers_between_partitions_on_the_same_devices_are_free() -> None:
    assert _latency(_diamond(), [0, 1, 2, 3], [1, 1, 1, 1]) == 8
    problem = StaticProblem(_diamond(), np.array([1000, 1000]), 10.0)
    plan = StaticPlan(np.array([0, 0, 0, 1]), ((0, 1), (0, 1)))
    assert latency_s(problem, plan) == 8
    other = StaticPlan(np.array([0, 0, 0, 1]), ((0, 1), (1, 0)))
    assert latency_s(problem, other) == 4 + 6 + 4


def test_a_cycle_is_refused() -> None:
    with pytest.raises(CycleError, match=r"2 partitions wait .* circle"):
        _latency(_diamond(), [0, 1, 0, 0], [0, 1])


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(SpecError, match="positive transfer rate, got 0"):
        _latency(_diamond(), [0, 0, 0, 0], [0], rate=0.0)


@pytest.mark.parametrize("seed", range(60))
def test_latencies_equal_those_of_torch(seed: int) -> None:
    rng, problem = random.Random(seed), random_problem(seed)
    graph = problem.graph
    drawn = [rng.randrange(1 + graph.n_ops // 2) for _ in range(graph.n_ops)]
    part = np.unique(drawn if rng.random() < 0.3 else sorted(drawn), return_inverse=True)[1]
    homes = [(rng.randrange(3),) for _ in range(int(part.max()) + 1)]
    side = torch_side(graph)
    by_torch = torch_partitions(side, part, homes)
    plan = StaticPlan(part, tuple(homes))
    if any(check_dependency(partition) for partition in by_torch):
        with pytest.raises(CycleError):
            latency_s(problem, plan)
    else:
        expected = torch_latency_s(side, by_torch, problem.bytes_per_s)
        assert latency_s(problem, plan) == expected


def test_deep_and_wide_graphs_finish() -> None:
    deep = chain(100_000)
    part = np.arange(100_000) // 25_000
    memory = np.array([1, 1])
    plan = StaticPlan(part, ((0,), (1,), (0,), (1,)))
    cuts = sum(int(deep.output_bytes[i]) for i in (24_999, 49_999, 74_999))
    expected = float(deep.latency_s.sum()) + cuts / 8
    assert latency_s(StaticProblem(deep, memory, 8.0), plan) == expected
    wide = diamonds(10_000)
    together = StaticPlan(np.zeros(wide.n_ops, dtype=np.int64), ((0,),))
    middle = np.maximum(wide.latency_s[1::3], wide.latency_s[2::3]).sum()
    expected = float(wide.latency_s[::3].sum() + middle)
    assert latency_s(StaticProblem(wide, memory, 8.0), together) == expected
