"""State kept besides weights, tensor by tensor."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.graph import IntArray
from fxpart.core.weight_state import with_state
from fxpart.errors import SpecError
from tests.sketch import chain


def _of(*numbers: int) -> IntArray:
    return np.array(numbers, dtype=np.int64)


def test_existing_state_stays_a_separate_tensor() -> None:
    before = replace(chain(3), weight_state_bytes=_of(7, 0, 0))
    graph = with_state(before, _of(2, 0), [_of(5, 6), _of(1, 2)])
    assert graph.state_tensor_bytes.tolist() == [[7, 0, 0], [6, 0, 5], [2, 0, 1]]
    assert graph.weight_state_bytes.tolist() == [15, 0, 6]


def test_parts_of_one_weight_have_separate_tensors() -> None:
    graph = with_state(chain(2), _of(1, 1, 0), [_of(3, 4, 5)])
    assert graph.state_tensor_bytes.tolist() == [[5, 3], [0, 4]]


def test_no_additional_state_leaves_the_graph_unchanged() -> None:
    graph = chain(2)
    assert with_state(graph, _of(), [_of()]) is graph
    assert with_state(graph, _of(0), []) is graph


def test_tensors_of_inconsistent_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="must add up to its bytes"):
        replace(chain(2), state_tensor_bytes=np.array([[1, 0]]))
