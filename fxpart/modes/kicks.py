"""Leave a local optimum: put a stretch of units elsewhere at random, improve again, keep what won.

Iterated local search: Lourenço, Martin, Stützle, in: Handbook of Metaheuristics, 2003,
doi:10.1007/0-306-48056-5_11.
"""

import numpy as np

from fxpart.chance import below
from fxpart.compiled import compiled
from fxpart.cost.kernels import peak_on_device
from fxpart.graph import IntArray
from fxpart.modes.local_search import SearchTables, improve, refreshed
from fxpart.modes.units import Units

__all__ = ["kick"]


@compiled
def _all_fit(s: SearchTables, device_of: IntArray) -> bool:
    for device in range(s.sizes.shape[0]):
        if peak_on_device(s.memory, device_of, device, s.change) > s.sizes[device]:
            return False
    return True


@compiled
def _kicked(device_of: IntArray, units: Units, devices: int, state: IntArray) -> IntArray:
    """Return the placement with a stretch of units on another device, or two units exchanged.

    Where memory is tight, only an exchange may fit.
    """
    start, ops = units
    count, trial = start.shape[0] - 1, device_of.copy()
    # Mostly short stretches: what is far from the optimum seldom comes back to it.
    length = 1 + below(state, 1 + below(state, max(1, count // 4)))
    first, other = below(state, max(1, count - length + 1)), below(state, count)
    exchange = below(state, 2) == 1
    target = device_of[ops[start[other]]] if exchange else below(state, devices)
    if exchange:
        trial[ops[start[other] : start[other + 1]]] = device_of[ops[start[first]]]
    for unit in range(first, min(count, first + (1 if exchange else length))):
        trial[ops[start[unit] : start[unit + 1]]] = target
    return trial


@compiled
def kick(  # noqa: PLR0917 - compiled: all by position
    s: SearchTables, device_of: IntArray, units: Units, kicks: int, max_passes: int, seed: int
) -> float:
    """Change `device_of` to the fastest found in `kicks` tries; return its latency in seconds."""
    state = np.array([seed], dtype=np.int64)
    latency = refreshed(s, device_of)
    for _ in range(kicks):
        trial = _kicked(device_of, units, s.sizes.shape[0], state)
        if (trial == device_of).all() or not _all_fit(s, trial):
            continue
        found = improve(s, trial, units, max_passes)
        if found < latency * (1.0 - s.min_gain):
            latency = found
            device_of[:] = trial
    return float(latency)
