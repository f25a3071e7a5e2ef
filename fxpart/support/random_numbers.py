"""Seeded random numbers for compiled loops, identical in every process and on every machine.

A linear congruential generator of 64 bits with the multiplier of Knuth, The Art of Computer
Programming, vol. 2, section 3.3.4; the lower bits have short periods and are dropped. Numba's
``np.random`` has one state per thread; here the state is an argument.
"""

import numpy as np
from numpy.typing import NDArray

from fxpart.support.compiled import compiled

__all__ = ["below", "chance", "share"]

_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
_DROPPED_BITS, _MASK, _NUMBERS = 33, 0x7FFFFFFF, 2147483648.0


@compiled
def chance(seed: int) -> NDArray[np.int64]:
    """Return the state of a new generator. Shape (1,)."""
    return np.array([seed], dtype=np.int64)


@compiled
def below(state: NDArray[np.int64], bound: int) -> int:
    """Return a number from 0 to `bound` - 1, and advance `state`. `bound` is up to 2^31."""
    state[0] = state[0] * _MULTIPLIER + _INCREMENT
    return int((state[0] >> _DROPPED_BITS) & _MASK) % bound


@compiled
def share(state: NDArray[np.int64]) -> float:
    """Return a number in [0, 1), a multiple of 2^-31, and advance `state`."""
    state[0] = state[0] * _MULTIPLIER + _INCREMENT
    return float((state[0] >> _DROPPED_BITS) & _MASK) / _NUMBERS
