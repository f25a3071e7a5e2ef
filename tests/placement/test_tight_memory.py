"""Random small problems with few feasible placements: none that has one is refused."""

import itertools

import numpy as np
import pytest

from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from tests import independent
from tests.sketch import devices, problem, random_graph

PROBLEMS = range(60, 126)
"""Two of them have a placement, but filling in order and best fit refuse them."""


def _tight(seed: int) -> Problem:
    random = np.random.default_rng(seed)
    graph = random_graph(seed, int(random.integers(3, 7)))
    n = graph.n_ops
    whole = independent.peak_bytes(graph, np.zeros(n, dtype=np.int64), 0)
    sizes = [max(1, int(whole * random.uniform(0.45, 0.85))) for _ in range(int(2 + seed % 2))]
    return problem(graph, devices(*sizes))


def _fits(this: Problem) -> bool:
    """Return whether any placement fits, by an independent count of memory."""
    graph, sizes = this.graph, this.topology.memory_bytes
    peaks: dict[tuple[int, ...], bool] = {}
    for placed in itertools.product(range(len(sizes)), repeat=graph.n_ops):
        device_of = np.array(placed, dtype=np.int64)[graph.group]
        key = tuple(device_of.tolist())
        if key not in peaks:
            peaks[key] = all(
                independent.peak_bytes(graph, device_of, device) <= size
                for device, size in enumerate(sizes.tolist())
            )
            if peaks[key]:
                return True
    return False


@pytest.mark.parametrize("mode", ["size_based", "kl_based", "cost_aware"])
def test_no_problem_with_a_placement_is_refused(mode: str) -> None:
    refused = 0
    for seed in PROBLEMS:
        this = _tight(seed)
        try:
            make_mode(mode)(this)
        except InfeasibleError:
            refused += 1
            assert not _fits(this), f"problem {seed} has a placement"
    assert 0 < refused < len(PROBLEMS)
