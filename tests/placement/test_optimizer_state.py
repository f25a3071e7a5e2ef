"""Optimizer state in the memory checks of modes and in their error messages."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from fxpart.placement.search.fill import place_all
from fxpart.placement.search.table_packing import table_sizes
from fxpart.placement.sparse_nn import embedding_units
from tests.placement.test_sparse_nn import model_of_tables
from tests.placement.test_sparse_nn_random import random_model
from tests.sketch import Sketch, chain, devices, problem


def _apart(*sizes: tuple[int, int]) -> OpGraph:
    """Return independent operators, each with a weight and a state of the given bytes."""
    sketch = Sketch()
    for weight, _ in sizes:
        sketch.op([], 0, [sketch.weight(weight)], module=f"m{len(sketch.ops)}")
    return replace(sketch.graph(), weight_state_bytes=np.array([state for _, state in sizes]))


def test_the_largest_including_state_is_placed_first() -> None:
    # Of 5, 6, 6 and 7 bytes on 12 and 12: in graph order 7 does not fit, and in order of weights
    # alone, 5, 4, 4, 1, neither. 7 and 5 fit together.
    this = problem(_apart((5, 0), (4, 2), (4, 2), (1, 6)), devices(12, 12))
    device_of = place_all(this, [12, 12])
    assert device_of is not None
    assert device_of[0] == device_of[3] != device_of[1] == device_of[2]


def test_weights_and_states_beyond_all_devices_are_not_placed() -> None:
    this = problem(_apart((5, 0), (4, 2), (4, 2), (1, 6)), devices(12, 11))
    assert place_all(this, [12, 11]) is None


def test_the_error_of_a_model_that_does_not_fit_names_the_optimizer_state() -> None:
    graph = replace(chain(3), weight_state_bytes=np.array([20, 20, 0]))
    with pytest.raises(
        InfeasibleError, match=r"\(72 bytes, weights 30 B, optimizer state 40 B\), the devices"
    ):
        make_mode("size_based")(problem(graph, devices(20, 20)))
    with pytest.raises(InfeasibleError, match=r"\(32 bytes, weights 30 B, temporaries 2 B\)"):
        make_mode("size_based")(problem(chain(3), devices(10, 10)))


def test_the_minimum_for_a_table_includes_its_state() -> None:
    graph = model_of_tables(60, 50)
    # Weights are those of the tables between those of bottom and top.
    state_bytes = np.where(graph.weight_bytes > 10, 2 * graph.weight_bytes, 0)
    this = problem(replace(graph, weight_state_bytes=state_bytes), devices(10**6))
    sizes = table_sizes(this, embedding_units(graph))
    # Each reads an index of 3 bytes.
    assert sizes.unit_bytes.tolist() == [3 * 60 + 3, 3 * 50 + 3]


@pytest.mark.parametrize("seed", range(30))
def test_the_minimum_never_exceeds_the_need(seed: int) -> None:
    graph, rng = random_model(seed, 15), np.random.default_rng(seed)
    state_bytes = rng.integers(0, 3, len(graph.weight_bytes)) * graph.weight_bytes
    this = problem(replace(graph, weight_state_bytes=state_bytes), devices(10**6))
    units = embedding_units(graph)
    sizes = table_sizes(this, units)
    for unit in range(len(units)):
        assert sizes.at_least((unit,)) <= sizes.needed_bytes((unit,))
    all_units = tuple(range(len(units)))
    if all_units:
        assert sizes.at_least(all_units) <= sizes.needed_bytes(all_units)
