"""Simulated annealing of the largest load of any device or link, with incremental updates."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.kernels import peak_on_device
from fxpart.cost.tables import MemoryTables
from fxpart.placement.search.steady_tables import SteadyTables
from fxpart.support.compiled import compiled, inlined
from fxpart.support.random_numbers import below, chance, share

__all__ = ["anneal_steady", "steady_load_s"]

_AFRESH = 4096
"""Steps after which loads are recomputed, to bound the accumulation of rounding errors."""


@compiled
def _begin(
    t: SteadyTables,
    home: IntArray,
    reader_count: IntArray,
    device_s: FloatArray,
    link_s: FloatArray,
) -> None:
    """Compute the loads of devices (D,) and links (D, D), and the readers per value and device."""
    reader_count[:], device_s[:], link_s[:] = 0, 0.0, 0.0
    for unit in range(home.shape[0]):
        device_s[home[unit]] += t.time_s[unit, home[unit]]
    for value in range(t.maker.shape[0]):
        source = home[t.maker[value]]
        for i in range(t.reader_start[value], t.reader_start[value + 1]):
            target = home[t.readers[i]]
            if reader_count[value, target] == 0 and target != source:
                link_s[source, target] += _transfer_s(t, value, source, target)
            reader_count[value, target] += 1


@inlined
def _transfer_s(t: SteadyTables, value: int, source: int, target: int) -> float:
    seconds = t.link_latency_s[source, target]
    return float(seconds + t.value_bytes[value] * t.s_per_byte[source, target])


@compiled
def _move(  # noqa: PLR0917 - compiled: all by position
    t: SteadyTables,
    home: IntArray,
    reader_count: IntArray,
    device_s: FloatArray,
    link_s: FloatArray,
    unit: int,
    new: int,
) -> None:
    old = home[unit]
    device_s[old] -= t.time_s[unit, old]
    device_s[new] += t.time_s[unit, new]
    for i in range(t.produced_start[unit], t.produced_start[unit + 1]):
        value = t.produced[i]
        for target in range(device_s.shape[0]):
            if reader_count[value, target] > 0:
                if target != old:
                    link_s[old, target] -= _transfer_s(t, value, old, target)
                if target != new:
                    link_s[new, target] += _transfer_s(t, value, new, target)
    for i in range(t.read_start[unit], t.read_start[unit + 1]):
        value = t.read[i]
        source = home[t.maker[value]]
        reader_count[value, old] -= 1
        if reader_count[value, old] == 0 and source != old:
            link_s[source, old] -= _transfer_s(t, value, source, old)
        if reader_count[value, new] == 0 and source != new:
            link_s[source, new] += _transfer_s(t, value, source, new)
        reader_count[value, new] += 1
    home[unit] = new


@compiled
def _norm(device_s: FloatArray, link_s: FloatArray, scale: float, sharp: float) -> float:
    """Return the logarithm of the `sharp`-norm of all loads, in units of `scale`."""
    total = 0.0
    for source in range(device_s.shape[0]):
        total += (max(device_s[source], 0.0) / scale) ** sharp
        for target in range(device_s.shape[0]):
            if link_s[source, target] > 0.0:
                total += (link_s[source, target] / scale) ** sharp
    return float(np.log(total + 1e-300) / sharp)


@compiled
def steady_load_s(t: SteadyTables, home: IntArray) -> float:
    """Return the largest load of any device or link, in s; `home` (U,) is each unit's device."""
    devices = t.time_s.shape[1]
    reader_count = np.zeros((t.maker.shape[0], devices), dtype=np.int64)
    device_s, link_s = np.zeros(devices), np.zeros((devices, devices))
    _begin(t, home, reader_count, device_s, link_s)
    return float(max(device_s.max(), link_s.max()))


@compiled
def anneal_steady(  # noqa: PLR0912, PLR0915, PLR0917 - compiled: one loop, all by position
    t: SteadyTables,
    m: MemoryTables,
    room_bytes: IntArray,
    watched: bool,
    home: IntArray,
    seed: int,
    steps: int,
    hot: float,
    cold: float,
    blunt: float,
    keen: float,
) -> None:
    """Anneal `home` (U,) in place to the best placement found.

    The energy is the logarithm of the p-norm of all loads, with p increasing from `blunt` to
    `keen`. With `watched`, moves must fit in memory.
    """
    state = chance(seed)
    units, devices = t.time_s.shape
    reader_count = np.zeros((t.maker.shape[0], devices), dtype=np.int64)
    device_s, link_s = np.zeros(devices), np.zeros((devices, devices))
    _begin(t, home, reader_count, device_s, link_s)
    placed = np.empty(t.unit_ops.shape[0], dtype=np.int64)
    for unit in range(units):
        placed[t.unit_ops[t.unit_start[unit] : t.unit_start[unit + 1]]] = home[unit]
    change = np.empty(placed.shape[0] + 1, dtype=np.int64)
    best = max(device_s.max(), link_s.max())
    best_of = home.copy()
    cooled, sharper = (cold / hot) ** (1.0 / max(1, steps)), (keen / blunt) ** (1.0 / max(1, steps))
    if best <= 0.0:
        return
    temperature, sharp, scale = hot, blunt, best
    energy = _norm(device_s, link_s, scale, sharp)
    for step in range(steps):
        temperature *= cooled
        sharp *= sharper
        if step % 256 == 0:
            if step % _AFRESH == 0:
                _begin(t, home, reader_count, device_s, link_s)
            scale = max(device_s.max(), link_s.max())
            energy = _norm(device_s, link_s, scale, sharp)
        unit = below(state, units)
        old = home[unit]
        new = below(state, devices)
        produced_count = t.produced_start[unit + 1] - t.produced_start[unit]
        nearby = produced_count + t.read_start[unit + 1] - t.read_start[unit]
        if nearby > 0 and below(state, 8) > 0:
            pick = below(state, nearby)
            if pick < produced_count:
                value = t.produced[t.produced_start[unit] + pick]
                first, last = t.reader_start[value], t.reader_start[value + 1]
                new = home[t.readers[first + below(state, last - first)]]
            else:
                new = home[t.maker[t.read[t.read_start[unit] + pick - produced_count]]]
        if new == old:
            continue
        _move(t, home, reader_count, device_s, link_s, unit, new)
        new_energy = _norm(device_s, link_s, scale, sharp)
        is_accepted = new_energy - energy <= -temperature * np.log(share(state) + 1e-12)
        if is_accepted and watched:
            placed[t.unit_ops[t.unit_start[unit] : t.unit_start[unit + 1]]] = new
            is_accepted = peak_on_device(m, placed, new, change) <= room_bytes[new]
            is_accepted = is_accepted and peak_on_device(m, placed, old, change) <= room_bytes[old]
            if not is_accepted:
                placed[t.unit_ops[t.unit_start[unit] : t.unit_start[unit + 1]]] = old
        if not is_accepted:
            _move(t, home, reader_count, device_s, link_s, unit, old)
            continue
        energy = new_energy
        largest = max(device_s.max(), link_s.max())
        if largest < best * (1 - 1e-9):
            best = largest
            best_of[:] = home
    home[:] = best_of
