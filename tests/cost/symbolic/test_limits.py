from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxpart.cost.symbolic.formula import MaxFormula, max_formula
from fxpart.cost.symbolic.limits import largest, largest_batch, smallest_memory
from fxpart.errors import InfeasibleError, SpecError

BATCH = np.array([[0], [1]])
BOTH = np.array([[0, 0], [1, 0], [1, 1], [1, 2]])


def _peak(*rows: tuple[int, int]) -> MaxFormula:
    return max_formula(("batch",), BATCH, np.array(rows), "bytes")


def _both(*rows: tuple[int, int, int, int]) -> MaxFormula:
    return max_formula(("batch", "seq_len"), BOTH, np.array(rows), "bytes")


def test_the_largest_batch_by_hand() -> None:
    # 10 + 3 b is at most 40 up to b = 10.
    assert largest_batch([_peak((10, 3))], 40) == 10
    assert largest_batch([_peak((10, 3))], 39) == 9
    # The second device is full first: 5 + 8 b is at most 45 up to b = 5.
    assert largest_batch([_peak((10, 3)), _peak((5, 8))], [40, 45]) == 5


def test_unlimited_memory_gives_the_largest_size_searched() -> None:
    assert largest_batch([_peak((10, 0))], 40) == 2**20
    assert largest_batch([_peak((10, 0))], 40, most=100) == 100


def test_sizes_outside_the_captured_range_are_not_returned() -> None:
    formula = max_formula(("batch",), BATCH, np.array([[10, 3]]), "bytes", ((3, 64),))
    assert largest_batch([formula], 10**6) == 64
    assert largest_batch([formula], 19) == 3
    with pytest.raises(InfeasibleError, match="no batch fits: batch=3 needs 19 B on device 0"):
        largest_batch([formula], 18)
    with pytest.raises(SpecError, match="most=2 must be 3 or more"):
        largest_batch([formula], 10**6, most=2)


def test_the_longest_sequence_of_a_batch() -> None:
    # 2 s^2 + s at batch 2: 2 * 2 * 6^2 + 2 * 6 = 156, and 2 * 2 * 7^2 + 2 * 7 = 210.
    assert largest([_both((0, 0, 1, 2))], 200, symbol="seq_len", batch=2) == 6
    assert largest_batch([_both((0, 0, 1, 2))], 200, seq_len=6) == 2


def test_sizes_beyond_int64_are_compared_exactly() -> None:
    formula = _both((0, 0, 0, 2**40))
    # 2^40 * 2^20 * b at s = 2^10; the search goes up to b = 2^20, where it is 2^80.
    assert largest_batch([formula], 2**62 - 1, seq_len=2**10) == 3


def test_a_decreasing_peak_is_searched_at_every_size() -> None:
    # (b - 10)^2: 81 at 1, 0 at 10, 100 at 20. With a limit of 3 it fits from 9 to 11, and nowhere
    # where a bisection of 1 to 100 looks.
    falls = max_formula(("batch",), np.array([[0], [1], [2]]), np.array([[100, -20, 1]]), "bytes")
    assert largest_batch([falls], 3, most=100) == 11
    assert largest_batch([falls], 16) == 14
    assert largest_batch([falls], 100) == 20
    with pytest.raises(InfeasibleError):
        largest_batch([falls], -1, most=100)


def test_a_negative_coefficient_alone_needs_no_search() -> None:
    # b^2 - b never decreases from 1 on; searching every size would take too long.
    grows = max_formula(("batch",), np.array([[0], [1], [2]]), np.array([[0, -1, 1]]), "bytes")
    assert largest_batch([grows], 10**12, most=2**60) == 10**6


@given(
    rows=st.lists(st.tuples(*[st.integers(-30, 60) for _ in range(4)]), min_size=1, max_size=6),
    memory=st.integers(0, 40_000),
    seq_len=st.integers(1, 12),
)
@example(rows=[(0, 0, 1, 2)], memory=200, seq_len=6)
@example(rows=[(0, 0, 1, 2)], memory=2, seq_len=6)
def test_equal_to_trying_every_size(
    rows: list[tuple[int, int, int, int]], memory: int, seq_len: int
) -> None:
    formula = _both(*rows)
    batch = np.arange(1, 301)
    fits = batch[formula.at(batch=batch, seq_len=seq_len) <= memory]
    if len(fits):
        assert largest_batch([formula], memory, most=300, seq_len=seq_len) == fits[-1]
    else:
        with pytest.raises(InfeasibleError):
            largest_batch([formula], memory, most=300, seq_len=seq_len)


def test_the_error_states_the_needed_memory() -> None:
    formulas = [_peak((10, 3)), _peak((5000, 100))]
    with pytest.raises(InfeasibleError) as caught:
        largest_batch(formulas, [100, 2000])
    assert str(caught.value) == (
        "no batch fits: batch=1 needs 5.10 kB on device 1, which has 2.00 kB; use larger or more"
        " devices"
    )
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5100, 2000)


def test_memory_equal_to_the_peak_is_enough() -> None:
    formulas = [_peak((100, 1), (10, 30)), _peak((5, 8))]
    assert smallest_memory(formulas, batch=3) == (103, 29)
    assert smallest_memory(formulas, batch=4) == (130, 37)
    assert largest_batch(formulas, smallest_memory(formulas, batch=4)) == 4


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda f: largest_batch([], 4), "no formulas"),
        (lambda f: largest_batch([f], [4, 4]), "1 devices have formulas and 2 have memory"),
        (lambda f: largest_batch([f], 4, most=0), "most=0 must be 1 or more"),
        (lambda f: largest([f], 4, symbol="seq_len"), "seq_len is not symbolic here"),
        (lambda f: largest([f], 4, symbol="batch", batch=3), "leave out batch="),
        (lambda f: largest_batch([_both((0, 0, 1, 2))], 4), "a size of seq_len is missing"),
        (lambda f: largest_batch([_both((0, 0, 1, 2))], 4, seq_len=0), "seq_len=0 must be"),
        (lambda f: smallest_memory([f]), "a size of batch is missing"),
        (lambda f: smallest_memory([f], bach=2), "bach is not symbolic here; nearest: batch"),
        (
            lambda f: smallest_memory(
                [max_formula(("batch",), BATCH, np.ones((1, 2)), "s")], batch=2
            ),
            "memory needs formulas in bytes, got one in s",
        ),
    ],
)
def test_invalid_requests_are_refused(call: Callable[[MaxFormula], object], says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        call(_peak((10, 3)))
    assert "\n" not in str(caught.value)
