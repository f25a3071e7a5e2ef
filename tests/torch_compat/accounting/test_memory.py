"""Static memory: by hand, and as counted by torch's partitions."""

import random

import numpy as np
import pytest

from fxpart.torch_compat.accounting.cost import used_bytes
from tests.torch_compat.accounting.graphs import random_graph, static_graph
from tests.torch_compat.accounting.torch_side import torch_partitions, torch_side


def test_memory_by_hand() -> None:
    # Operators 1 and 2 read 0, 3 reads both; 0 and 3 read source 0, 1 and 2 read source 1.
    graph = static_graph(
        [[], [0], [0], [1, 2]],
        total=[100, 200, 300, 400],
        output=[1, 2, 3, 4],
        seconds=[1.0] * 4,
        sources=[[0], [1], [1], [0]],
        source_bytes=[10, 20],
    )
    whole = used_bytes(graph, np.zeros(4, dtype=np.int64), 1)
    assert whole.tolist() == [1000 + 30]
    # Operators 1 and 2 both read the output of 0, which counts for each of them.
    halves = used_bytes(graph, np.array([0, 1, 1, 0]), 3)
    assert halves.tolist() == [100 + 400 + 2 + 3 + 10, 200 + 300 + 2 * 1 + 20, 0]
    assert used_bytes(graph, np.array([1, 0, 0, 1]), 2).tolist() == [522, 515]


@pytest.mark.parametrize("seed", range(25))
def test_memory_equals_that_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 20))
    count = rng.randint(1, 5)
    part = np.array([rng.randrange(count) for _ in range(graph.n_ops)], dtype=np.int64)
    partitions = torch_partitions(torch_side(graph), part, [[0]] * count)
    assert used_bytes(graph, part, count).tolist() == [p.used_mem_bytes for p in partitions]
