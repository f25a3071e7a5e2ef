"""Partitions to devices: as torch if it finds some, and in more cases than torch."""

import random
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from torch.fx.experimental.accelerator_partitioner import get_device_to_partitions_mapping

from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.device_map import map_partitions
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticProblem
from tests.torch_compat.accounting.graphs import random_problem, static_graph
from tests.torch_compat.accounting.torch_side import torch_devices, torch_partitions, torch_side


def _problem(graph: StaticGraph, memory: list[int]) -> StaticProblem:
    return StaticProblem(graph, np.array(memory, dtype=np.int64), 1.0)


def _apart(*total: int, shared_source: int = 0) -> StaticGraph:
    """Return operators that read nothing but one source."""
    return static_graph(
        [[] for _ in total],
        total=total,
        output=[0] * len(total),
        seconds=[1.0] * len(total),
        sources=[[0] for _ in total],
        source_bytes=[shared_source],
    )


def _mapped(graph: StaticGraph, memory: list[int], fixed: list[int] | None = None) -> list[int]:
    part = np.arange(graph.n_ops)
    home = map_partitions(_problem(graph, memory), part, graph.n_ops, fixed or [-1] * graph.n_ops)
    assert home is not None
    return [int(device) for device in home]


def test_each_partition_goes_where_the_least_memory_remains() -> None:
    assert _mapped(_apart(10, 10, 5), [100, 30, 16]) == [2, 1, 2]


def test_a_fixed_partition_takes_its_memory_first() -> None:
    assert _mapped(_apart(10, 10), [100, 15], [-1, 1]) == [0, 1]


def test_an_exact_fit_is_accepted() -> None:
    assert _mapped(_apart(10, 20), [20, 10]) == [1, 0]


def test_a_source_counts_once_per_device() -> None:
    # Torch counts the 50 bytes twice, and finds no device for the second.
    assert _mapped(_apart(10, 10, shared_source=50), [71]) == [0, 0]


def test_largest_first_is_tried_if_the_given_order_fails() -> None:
    # In order, 4 and 4 fill the first device, and 6 and 6 do not both fit the second.
    assert sorted(_mapped(_apart(4, 4, 6, 6), [10, 10])) == [0, 0, 1, 1]


def test_partitions_that_do_not_fit_get_no_devices() -> None:
    problem = _problem(_apart(10, 10), [15])
    assert map_partitions(problem, np.arange(2), 2, [-1, -1]) is None


def _random_parts(rng: random.Random, n: int) -> npt.NDArray[np.int64]:
    drawn = [rng.randrange(rng.randint(1, n)) for _ in range(n)]
    return np.unique(drawn, return_inverse=True)[1].astype(np.int64)


SEEDS = range(60)


@cache
def _case(seed: int) -> tuple[StaticProblem, npt.NDArray[np.int64], list[int], list[int] | None]:
    """Return a problem, partitions, their fixed devices, and torch's devices if it finds any."""
    rng, problem = random.Random(seed), random_problem(seed)
    part = _random_parts(rng, problem.graph.n_ops)
    devices = len(problem.memory_bytes)
    fixed = [p if p < devices and rng.random() < 0.3 else -1 for p in range(int(part.max()) + 1)]
    side = torch_side(problem.graph)
    partitions = torch_partitions(side, part, [[f] if f >= 0 else [] for f in fixed])
    mapped = get_device_to_partitions_mapping(partitions, torch_devices(problem.memory_bytes))
    return problem, part, fixed, [p.logical_device_ids[0] for p in partitions] if mapped else None


@pytest.mark.parametrize("seed", SEEDS)
def test_devices_equal_those_of_torch(seed: int) -> None:
    problem, part, fixed, expected = _case(seed)
    home = map_partitions(problem, part, len(fixed), fixed)
    if expected is not None:
        assert home is not None
        assert home.tolist() == expected
    elif home is not None:
        assert all(f in (-1, h) for f, h in zip(fixed, home, strict=True))
        devices = len(problem.memory_bytes)
        free = [d for d in range(devices) if d not in fixed]
        used = used_bytes(problem.graph, home[part], devices)
        assert (used[free] <= problem.memory_bytes[free]).all()


def test_the_cases_include_answers_of_torch_and_further_ones_of_ours() -> None:
    by_torch = [seed for seed in SEEDS if _case(seed)[3] is not None]
    ours = []
    for seed in SEEDS:
        problem, part, fixed, _ = _case(seed)
        if map_partitions(problem, part, len(fixed), fixed) is not None:
            ours.append(seed)
    assert len(by_torch) >= 30
    assert set(by_torch) < set(ours)
