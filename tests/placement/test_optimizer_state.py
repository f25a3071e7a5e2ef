"""What an optimizer keeps for weights, where modes ask for room and say that there is none."""

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
    """Return operators without values, each with a weight and a state of those bytes."""
    sketch = Sketch()
    for weight, _ in sizes:
        sketch.op([], 0, [sketch.weight(weight)], module=f"m{len(sketch.ops)}")
    return replace(sketch.graph(), weight_state_bytes=np.array([state for _, state in sizes]))


def test_the_largest_with_its_state_is_placed_first() -> None:
    # Of 5, 6, 6 and 7 bytes on 12 and 12: in graph order 7 finds no room, and in order of weights
    # alone, 5, 4, 4, 1, neither. 7 and 5 go together.
    this = problem(_apart((5, 0), (4, 2), (4, 2), (1, 6)), devices(12, 12))
    device_of = place_all(this, [12, 12])
    assert device_of is not None
    assert device_of[0] == device_of[3] != device_of[1] == device_of[2]


def test_weights_and_states_beyond_all_devices_are_not_placed() -> None:
    this = problem(_apart((5, 0), (4, 2), (4, 2), (1, 6)), devices(12, 11))
    assert place_all(this, [12, 11]) is None


def test_a_model_that_does_not_fit_says_what_its_optimizer_keeps() -> None:
    graph = replace(chain(3), weight_state_bytes=np.array([20, 20, 0]))
    with pytest.raises(
        InfeasibleError, match=r"\(72 bytes, weights 30 B, optimizer state 40 B\), the devices"
    ):
        make_mode("size_based")(problem(graph, devices(20, 20)))
    with pytest.raises(InfeasibleError, match=r"\(32 bytes, weights 30 B, temporaries 2 B\)"):
        make_mode("size_based")(problem(chain(3), devices(10, 10)))


def test_the_least_that_a_table_needs_has_its_state() -> None:
    graph = model_of_tables(60, 50)
    # Weights are the tables' between those of bottom and top.
    kept = np.where(graph.weight_bytes > 10, 2 * graph.weight_bytes, 0)
    this = problem(replace(graph, weight_state_bytes=kept), devices(10**6))
    sizes = table_sizes(this, embedding_units(graph))
    # Each reads an index of 3 bytes.
    assert sizes.unit_bytes.tolist() == [3 * 60 + 3, 3 * 50 + 3]


@pytest.mark.parametrize("seed", range(30))
def test_the_least_is_never_more_than_what_is_needed(seed: int) -> None:
    graph, rng = random_model(seed, 15), np.random.default_rng(seed)
    kept = rng.integers(0, 3, len(graph.weight_bytes)) * graph.weight_bytes
    this = problem(replace(graph, weight_state_bytes=kept), devices(10**6))
    units = embedding_units(graph)
    sizes = table_sizes(this, units)
    for unit in range(len(units)):
        assert sizes.at_least((unit,)) <= sizes.needed_bytes((unit,))
    everything = tuple(range(len(units)))
    if everything:
        assert sizes.at_least(everything) <= sizes.needed_bytes(everything)
