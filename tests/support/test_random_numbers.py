"""Random numbers from a seed: known values, their range, and a uniform distribution."""

import numpy as np
import pytest

from fxpart.support.random_numbers import below, chance, share

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


def _states(seed: int, count: int) -> list[int]:
    """Return the states after `seed` with integers that do not overflow."""
    states = [seed]
    for _ in range(count):
        states.append((states[-1] * MULTIPLIER + INCREMENT) % 2**64)
    return states[1:]


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_numbers_are_the_middle_bits_of_the_states(seed: int) -> None:
    numbers = [state >> 33 for state in _states(seed, 50)]
    state = chance(seed)
    assert [below(state, 1000) for _ in range(50)] == [number % 1000 for number in numbers]
    state = chance(seed)
    assert [share(state) for _ in range(50)] == [number / 2**31 for number in numbers]


def test_shares_are_uniformly_distributed() -> None:
    state = chance(7)
    shares = np.array([share(state) for _ in range(20_000)])
    assert shares.min() >= 0.0
    assert shares.max() < 1.0
    counts = np.bincount((shares * 20).astype(int), minlength=20)
    # Chi squared over 20 bins: above 44 in one of a thousand cases.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 44
    assert abs(float(np.corrcoef(shares[:-1], shares[1:])[0, 1])) < 0.03


def test_every_number_in_range_occurs_and_no_other() -> None:
    state = chance(0)
    assert {below(state, 7) for _ in range(500)} == set(range(7))
    assert {below(state, 1) for _ in range(10)} == {0}


def test_streams_are_independent() -> None:
    first, second = chance(3), chance(3)
    undisturbed = [below(first, 100) for _ in range(5)]
    other = chance(4)
    mixed = list[int]()
    for _ in range(5):
        mixed.append(below(second, 100))
        below(other, 100)
    assert mixed == undisturbed
