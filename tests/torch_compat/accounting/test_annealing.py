"""The allowed worsening of a step: with the probability of annealing, decreasing over time."""

import numpy as np
import pytest

from fxpart.support.random_numbers import chance
from fxpart.torch_compat.accounting.annealing import allowance


@pytest.mark.parametrize("worse", [0.5, 2.0, 4.0])
def test_a_worse_step_is_accepted_with_the_annealing_probability(worse: float) -> None:
    state, temperature = chance(11), 2.0
    accepted = [allowance(temperature, 0, 100, state) >= worse for _ in range(20_000)]
    assert float(np.mean(accepted)) == pytest.approx(np.exp(-worse / temperature), abs=0.015)


def test_the_temperature_falls_to_a_thousandth() -> None:
    first, last = chance(5), chance(5)
    for _ in range(10):
        ratio = allowance(1.0, 100, 100, last) / allowance(1.0, 0, 100, first)
        assert ratio == pytest.approx(np.exp(-7.0), rel=1e-9)


def test_at_zero_temperature_nothing_worse_is_allowed() -> None:
    state = chance(1)
    assert all(allowance(0.0, step, 10, state) == 0 for step in range(10))
