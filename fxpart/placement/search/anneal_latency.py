"""Annealing of the latency where memory is short, by way of placements that do not quite fit.

Where every device is full, most moves fit only after another: searches that keep what fits at each
step end early. Here what devices hold too much costs latency, and only what fits is returned.
Metropolis et al.: Equation of state calculations by fast computing machines. J. Chem. Phys. 21,
1953, doi:10.1063/1.1699114.
"""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.placement.search.units import Units
from fxpart.support.compiled import compiled, inlined
from fxpart.support.random_numbers import below, chance, share

__all__ = ["anneal_latency"]

_COLD = 1e-4
_EXCESS_WEIGHT = 10.0
"""A device that holds 1 % too much costs 10 % of the latency."""
_LONGEST, _NEAR = 16, 8


@inlined
def _moved(units: Units, device_of: IntArray, trial: IntArray, state: IntArray) -> int:
    """Change `trial`, a copy of `device_of`, by a move; return the operators that moved.

    A short stretch of units goes to the device of one near it, or to any; or two stretches, of two
    devices, change places.
    """
    start, ops = units
    count, moved = start.shape[0] - 1, 0
    length = 1 if below(state, 2) else 1 + below(state, 1 + below(state, _LONGEST))
    first, other = below(state, count), below(state, count)
    exchange = below(state, 2) == 1
    if not exchange:
        other = first + below(state, 2 * (length + _NEAR)) - length - _NEAR
        other = min(max(other, 0), count - 1)
    home, target = device_of[ops[start[first]]], device_of[ops[start[other]]]
    for i in range(start[first], start[min(first + length, count)]):
        if device_of[ops[i]] != target and (not exchange or device_of[ops[i]] == home):
            trial[ops[i]] = target
            moved += 1
    if exchange and home != target:
        for i in range(start[other], start[min(other + length, count)]):
            if device_of[ops[i]] == target:
                trial[ops[i]] = home
                moved += 1
    return moved


@inlined
def _excess(peaks: IntArray, memory_bytes: IntArray) -> float:
    """Return the sum over devices of the excess as a share of memory."""
    total = 0.0
    for device in range(memory_bytes.shape[0]):
        total += max(0, peaks[device] - memory_bytes[device]) / memory_bytes[device]
    return total


@compiled
def anneal_latency(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    m: MemoryTables,
    log: ScheduleLog,
    memory_bytes: IntArray,
    units: Units,
    device_of: IntArray,
    seed: int,
    steps: int,
    hot: float,
) -> None:
    """Change `device_of` (n,), which fits, to the fastest met that fits.

    `hot` is the temperature at first, as a share of the latency.
    """
    n, devices = device_of.shape[0], memory_bytes.shape[0]
    state, change = chance(seed), np.empty(n + 1, dtype=np.int64)
    peaks = np.empty(devices, dtype=np.int64)
    first_s, _ = schedule(t, device_of, log)
    current_value, best = first_s, first_s
    current, trial, best_of = device_of.copy(), device_of.copy(), device_of.copy()
    temperature, cooled = hot, (_COLD / hot) ** (1.0 / steps)
    for _ in range(steps):
        temperature *= cooled
        if not _moved(units, current, trial, state):
            continue
        limit = current_value - temperature * first_s * np.log(share(state) + 1e-12)
        latency_s, _ = schedule(t, trial, log)
        accepted = latency_s <= limit
        if accepted:
            for device in range(devices):
                peaks[device] = peak_on_device(m, trial, device, change)
            excess = _excess(peaks, memory_bytes)
            accepted = latency_s + _EXCESS_WEIGHT * first_s * excess <= limit
        if not accepted:
            trial[:] = current
            continue
        current[:], current_value = trial, latency_s + _EXCESS_WEIGHT * first_s * excess
        if excess == 0.0 and latency_s < best:
            best = latency_s
            best_of[:] = current
    device_of[:] = best_of
