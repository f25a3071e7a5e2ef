"""Simulated annealing of the largest load, with incrementally updated pin counts."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.placement.search.load_tables import LoadTables, loads_of
from fxpart.support.compiled import compiled, inlined
from fxpart.support.random_numbers import below, chance, share

__all__ = ["anneal_loads"]


@inlined
def _change(  # noqa: PLR0917 - compiled: one loop, all by position
    t: LoadTables, pins: IntArray, unit: int, old: int, new: int, changed: FloatArray
) -> None:
    """Set `changed` (2,) to the change of the two devices' loads by a move."""
    changed[0], changed[1] = -t.time_s[unit, old], t.time_s[unit, new]
    for i in range(t.unit_start[unit], t.unit_start[unit + 1]):
        output = t.unit_outputs[i]
        joined = t.output_start[output + 1] - t.output_start[output]
        pins_old, pins_new = pins[output, old], pins[output, new]
        seconds = t.output_s[output]
        if t.pays[old]:
            if pins_old == joined:
                changed[0] += seconds
            elif pins_old == 1:
                changed[0] -= seconds
        if t.pays[new]:
            if pins_new == 0:
                changed[1] += seconds
            elif pins_new + 1 == joined:
                changed[1] -= seconds


@inlined
def _apply(  # noqa: PLR0917 - compiled: one loop, all by position
    t: LoadTables,
    pins: IntArray,
    loads: FloatArray,
    used_bytes: IntArray,
    unit: int,
    old: int,
    new: int,
    changed: FloatArray,
) -> None:
    loads[old] += changed[0]
    loads[new] += changed[1]
    used_bytes[old] -= t.size_bytes[unit]
    used_bytes[new] += t.size_bytes[unit]
    for i in range(t.unit_start[unit], t.unit_start[unit + 1]):
        pins[t.unit_outputs[i], old] -= 1
        pins[t.unit_outputs[i], new] += 1


@compiled
def _pins(t: LoadTables, device_of: IntArray) -> IntArray:
    pins = np.zeros((t.output_s.shape[0], t.time_s.shape[1]), dtype=np.int64)
    for output in range(t.output_s.shape[0]):
        for i in range(t.output_start[output], t.output_start[output + 1]):
            pins[output, device_of[t.output_units[i]]] += 1
    return pins


@inlined
def _target(t: LoadTables, device_of: IntArray, unit: int, state: IntArray) -> int:
    """Return a device to try, usually that of a unit connected to this one."""
    devices = t.time_s.shape[1]
    degree = t.unit_start[unit + 1] - t.unit_start[unit]
    if degree == 0 or below(state, 16) == 0:
        return below(state, devices)
    output = t.unit_outputs[t.unit_start[unit] + below(state, degree)]
    joined = t.output_start[output + 1] - t.output_start[output]
    return int(device_of[t.output_units[t.output_start[output] + below(state, joined)]])


@inlined
def _accepted(  # noqa: PLR0917 - compiled: one loop, all by position
    powers: FloatArray, old: int, new: int, at_old: float, at_new: float, most_ratio: float
) -> bool:
    """Update the powers of two loads if the sum grows by a factor of at most `most_ratio`."""
    was_old, was_new = powers[old], powers[new]
    before = powers.sum()
    powers[old], powers[new] = at_old, at_new
    if powers.sum() <= before * most_ratio:
        return True
    powers[old], powers[new] = was_old, was_new
    return False


@compiled
def anneal_loads(  # noqa: PLR0912, PLR0915, PLR0917 - compiled: one loop, all by position
    t: LoadTables,
    device_of: IntArray,
    seed: int,
    steps: int,
    hot: float,
    cold: float,
    sharp0: float,
    sharp1: float,
) -> None:
    """Anneal `device_of` in place to the best placement found.

    The energy is the logarithm of the p-norm of the loads, with p increasing from `sharp0` to
    `sharp1`, and the temperature decreasing from `hot` to `cold`.
    """
    state = chance(seed)
    units, devices = t.time_s.shape
    loads, pins = loads_of(t, device_of), _pins(t, device_of)
    used_bytes = np.zeros(devices, dtype=np.int64)
    for unit in range(units):
        used_bytes[device_of[unit]] += t.size_bytes[unit]
    best = loads.max()
    best_of = device_of.copy()
    scale = best
    powers = np.zeros(devices)
    changed = np.zeros(2)
    changed2 = np.zeros(2)
    # Loads that round below 0 are clamped to 0 before taking powers.
    spans = max(1, steps // 256)
    cooled, sharper = (cold / hot) ** (1.0 / spans), (sharp1 / sharp0) ** (1.0 / spans)
    temperature, power = hot / cooled, sharp0 / sharper
    for step in range(steps):
        if step % 256 == 0:
            temperature *= cooled
            power *= sharper
            scale = loads.max()
            powers[:] = (np.maximum(loads, 0.0) / scale) ** power
        unit = below(state, units)
        old = device_of[unit]
        new = _target(t, device_of, unit, state)
        if new == old or not np.isfinite(t.time_s[unit, new]):
            continue
        swap = below(state, 4) == 0 or used_bytes[new] + t.size_bytes[unit] > t.room_bytes[new]
        _change(t, pins, unit, old, new, changed)
        most_ratio = (share(state) + 1e-12) ** (-temperature * power)
        if not swap:
            at_old = (max(loads[old] + changed[0], 0.0) / scale) ** power
            at_new = (max(loads[new] + changed[1], 0.0) / scale) ** power
            if not _accepted(powers, old, new, at_old, at_new, most_ratio):
                continue
            _apply(t, pins, loads, used_bytes, unit, old, new, changed)
            device_of[unit] = new
        else:
            other = -1
            degree = t.unit_start[unit + 1] - t.unit_start[unit]
            if degree > 0 and below(state, 2) == 0:
                output = t.unit_outputs[t.unit_start[unit] + below(state, degree)]
                joined = t.output_start[output + 1] - t.output_start[output]
                other = t.output_units[t.output_start[output] + below(state, joined)]
            for _ in range(8):
                if other >= 0 and device_of[other] == new:
                    break
                other = below(state, units)
            if device_of[other] != new or not np.isfinite(t.time_s[other, old]):
                continue
            grown = t.size_bytes[unit] - t.size_bytes[other]
            if (
                used_bytes[new] + grown > t.room_bytes[new]
                or used_bytes[old] - grown > t.room_bytes[old]
            ):
                continue
            before_old, before_new = loads[old], loads[new]
            _apply(t, pins, loads, used_bytes, unit, old, new, changed)
            _change(t, pins, other, new, old, changed2)
            at_old = (max(loads[old] + changed2[1], 0.0) / scale) ** power
            at_new = (max(loads[new] + changed2[0], 0.0) / scale) ** power
            if not _accepted(powers, old, new, at_old, at_new, most_ratio):
                changed[0], changed[1] = -changed[1], -changed[0]
                _apply(t, pins, loads, used_bytes, unit, new, old, changed)
                loads[old], loads[new] = before_old, before_new
                continue
            device_of[unit] = new
            _apply(t, pins, loads, used_bytes, other, new, old, changed2)
            device_of[other] = old
        if loads[old] < best and loads[new] < best:
            largest = loads.max()
            if largest < best * (1 - 1e-9):
                best = largest
                best_of[:] = device_of
    device_of[:] = best_of
