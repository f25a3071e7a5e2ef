"""One candidate: devices and latency as given by torch's own functions."""

import math
import random

import numpy as np
import pytest
from torch.fx.experimental.accelerator_partitioner import (
    check_dependency,
    get_device_to_partitions_mapping,
)

from fxpart.core.graph import IntArray
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.exact import candidate_s, homes_as_torch, plan_of
from fxpart.torch_compat.accounting.tables import tables_of
from tests.torch_compat.accounting.graphs import chain, random_problem
from tests.torch_compat.accounting.torch_side import (
    torch_devices,
    torch_latency_s,
    torch_partitions,
    torch_side,
)


def _random_parts(rng: random.Random, n: int) -> tuple[int, IntArray]:
    """Return consecutive operators as partitions, or any sets; some may be empty."""
    count = rng.randint(2, n + 1)
    part = [rng.randrange(count) for _ in range(n)]
    return count, np.array(sorted(part) if rng.random() < 0.6 else part, dtype=np.int64)


@pytest.mark.parametrize("seed", range(80))
def test_candidates_equal_those_of_torch(seed: int) -> None:
    problem = random_problem(seed)
    count, part = _random_parts(random.Random(seed), problem.graph.n_ops)
    side = torch_side(problem.graph)
    partitions = torch_partitions(side, part, [[] for _ in range(count)])
    by_torch = get_device_to_partitions_mapping(partitions, torch_devices(problem.memory_bytes))
    tables = tables_of(problem.graph, problem.bytes_per_s)
    mapped, home = homes_as_torch(tables, problem.memory_bytes, part, count)
    assert mapped == by_torch
    expected = math.inf
    if by_torch:
        assert home.tolist() == [p.logical_device_ids[0] for p in partitions]
        used = used_bytes(problem.graph, home[part], len(problem.memory_bytes))
        assert (used <= problem.memory_bytes).all()
        if not any(check_dependency(partition) for partition in partitions):
            expected = torch_latency_s(side, partitions, problem.bytes_per_s)
    assert candidate_s(tables, problem.memory_bytes, part, count) == expected


def test_the_graphs_above_cover_each_outcome() -> None:
    outcomes = set[str]()
    for seed in range(80):
        problem = random_problem(seed)
        count, part = _random_parts(random.Random(seed), problem.graph.n_ops)
        tables = tables_of(problem.graph, problem.bytes_per_s)
        mapped, _ = homes_as_torch(tables, problem.memory_bytes, part, count)
        circle = mapped and math.isinf(candidate_s(tables, problem.memory_bytes, part, count))
        outcomes.add("circle" if circle else "latency" if mapped else "no devices")
    assert outcomes == {"circle", "latency", "no devices"}


def test_a_cycle_has_infinite_cost() -> None:
    tables = tables_of(chain(3), 1.0)
    memory_bytes = np.array([10_000, 10_000], dtype=np.int64)
    assert math.isinf(candidate_s(tables, memory_bytes, np.array([0, 1, 0]), 2))
    assert candidate_s(tables, memory_bytes, np.array([0, 0, 1]), 2) == chain(3).latency_s.sum()


def test_empty_partitions_are_dropped() -> None:
    plan = plan_of(np.array([2, 0, 2]), np.array([1, 3, 0]))
    assert plan.partition_of.tolist() == [1, 0, 1]
    assert plan.devices_of_partition == ((1,), (0,))
