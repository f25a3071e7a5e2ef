"""CSR rows: by hand, and transposed twice."""

import random

import numpy as np
import pytest

from fxpart.core.graph import csr
from fxpart.torch_compat.accounting.problem import distinct_rows, grouped, transposed


def test_positions_of_each_key_are_ascending() -> None:
    start, places = grouped(np.array([2, 0, 2, 3, 0]), 5)
    assert start.tolist() == [0, 2, 2, 4, 5, 5]
    assert places.tolist() == [1, 4, 0, 2, 3]


def test_rows_are_transposed_by_item() -> None:
    # Row 0 has items 2 and 0, row 1 has none, row 2 has 2.
    start, rows, places = transposed(np.array([0, 2, 2, 3]), np.array([2, 0, 2]), 3)
    assert start.tolist() == [0, 1, 1, 3]
    assert rows.tolist() == [0, 0, 2]
    assert places.tolist() == [1, 0, 2]


@pytest.mark.parametrize("seed", range(5))
def test_transposing_twice_only_sorts(seed: int) -> None:
    rng = random.Random(seed)
    rows = [rng.sample(range(6), rng.randint(0, 6)) for _ in range(rng.randint(1, 9))]
    start, items = csr(rows)
    transposed_start, by_item, places = transposed(start, items, 6)
    assert items[places].tolist() == sorted(items.tolist())
    twice_start, twice, _ = transposed(transposed_start, by_item, len(rows))
    assert twice_start.tolist() == start.tolist()
    assert twice.tolist() == [item for row in rows for item in sorted(row)]


def test_duplicate_pairs_count_once() -> None:
    start, items = distinct_rows(np.array([1, 0, 1, 1]), np.array([5, 2, 3, 5]), 3)
    assert start.tolist() == [0, 1, 3, 3]
    assert items.tolist() == [2, 3, 5]
