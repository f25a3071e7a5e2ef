"""The search for the largest size, against trying all sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.experiment.largest_size import Share, largest


def _last(needed: Share, known: int, limit: int) -> int:
    size = known
    while size < limit and needed(size + 1) <= 1:
        size += 1
    return size


_STEPS = st.floats(0.0, 0.2)


@given(st.lists(_STEPS, min_size=1, max_size=80), st.lists(_STEPS, min_size=80, max_size=80))
def test_it_is_the_last_that_fits(steps: list[float], beside: list[float]) -> None:
    """Of any shares that rise, also if they stay the same or are infinite from some size."""
    limit = len(steps)

    def room(size: int) -> float:
        share = math.fsum(steps[:size])
        return math.inf if share > 3 else share

    def needed(size: int) -> float:
        return room(size) + math.fsum(beside[:size])

    for known in range(1, limit + 1):
        if needed(known) <= 1:
            assert largest(room, needed, known, limit) == _last(needed, known, limit)


@pytest.mark.parametrize("known", [1, 3, 99])
def test_yes_or_no_suffices(known: int) -> None:
    def fits(size: int) -> float:
        return 0.0 if size <= 99 else 2.0

    assert largest(fits, fits, known, 10**6) == 99
    assert largest(fits, fits, known, 99) == 99


def test_of_linear_memory_few_sizes_are_tried() -> None:
    asked: list[int] = []

    def needed(size: int) -> float:
        asked.append(size)
        return 0.2 + size / 100_000

    assert largest(lambda size: size / 100_000, needed, 8, 2**20) == 80_000
    assert len(asked) <= 5
