"""The best of all placements, where there are few: an exact answer, and a bound that is met."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray, csr
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = ["BestOfAll", "are_few", "best_of_all"]

_MOST = 2_500_000
"""Operators times placements up to which all are looked at: half a second, as of 9 on 4."""


class BestOfAll(NamedTuple):
    """The least latency and the least largest load of any placement, and placements that have them.

    Infinite, with every operator on device -1, where no placement fits. Devices have shape (n,).
    """

    latency_s: float
    latency_of: IntArray
    load_s: float
    load_of: IntArray

    def of(self, objective: str) -> IntArray:
        """Return the devices of the best placement for throughput, or else for latency."""
        return self.load_of if objective == "throughput" else self.latency_of


def are_few(problem: Problem, units: int) -> bool:
    """Return whether all placements of so many units are looked at in half a second."""
    devices = problem.topology.n_devices
    return math.log(problem.graph.n_ops) + units * math.log(devices) <= math.log(_MOST)


@lru_cache(maxsize=4)
def best_of_all(problem: Problem) -> BestOfAll | None:
    """Return the best of all placements that fit, None where there are more than a few.

    The first in the order of the devices, of equals. Not for published problems.
    """
    group = problem.graph.group
    firsts, unit_of = np.unique(group, return_inverse=True)
    if problem.workload is not None or not are_few(problem, len(firsts)):
        return None
    weights_of: list[list[int]] = [[] for _ in firsts]
    for op, unit in enumerate(unit_of.tolist()):
        weights_of[unit] += problem.graph.uses_of(op).tolist()
    weights = csr([sorted(set(used)) for used in weights_of])
    latency_of, load_of = np.full((2, len(group)), -1, dtype=np.int64)
    latency_s, load_s = _best(
        problem.costs,
        problem.memory,
        schedule_log(problem.costs),
        problem.topology.memory_bytes,
        unit_of.astype(np.int64),
        weights,
        latency_of,
        load_of,
    )
    return BestOfAll(float(latency_s), latency_of, float(load_s), load_of)


@inlined
def _weights_change(
    m: MemoryTables, weights: tuple[IntArray, IntArray], unit: int, used: IntArray, sign: int
) -> int:
    """Count the weights of a unit in or out of a device; return by how many bytes it changes."""
    start, listed = weights
    change = 0
    for i in range(start[unit], start[unit + 1]):
        if used[listed[i]] == (0 if sign > 0 else 1):
            change += sign * m.weight_bytes[listed[i]]
        used[listed[i]] += sign
    return change


@compiled
def _load_s(t: CostTables, device_of: IntArray, log: ScheduleLog, sent: int) -> float:
    """Return the largest load of any device or link, after a simulation that sent so many."""
    devices = t.op_time_s.shape[1]
    device_s, link_s = np.zeros(devices), np.zeros((devices, devices))
    for op in range(device_of.shape[0]):
        device_s[device_of[op]] += t.op_time_s[op, device_of[op]]
    for i in range(sent):
        link_s[log.sent[i, 1], log.sent[i, 2]] += log.sent_s[i, 1] - log.sent_s[i, 0]
    return float(max(device_s.max(), link_s.max(), t.issue_s[-1]))


@inlined
def _all_fit(m: MemoryTables, device_of: IntArray, room: IntArray, change: IntArray) -> bool:
    for device in range(room.shape[0]):
        if peak_on_device(m, device_of, device, change) > room[device]:
            return False
    return True


@compiled
def _costs_of(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    m: MemoryTables,
    log: ScheduleLog,
    room: IntArray,
    device_of: IntArray,
    change: IntArray,
) -> tuple[float, float]:
    """Return the latency and the largest load of a placement, infinite where it does not fit."""
    if not _all_fit(m, device_of, room, change):
        return np.inf, np.inf
    seconds, sent = schedule(t, device_of, log)
    return seconds, _load_s(t, device_of, log, sent)


@compiled
def _best(  # noqa: PLR0917 - compiled: all by position
    t: CostTables,
    m: MemoryTables,
    log: ScheduleLog,
    room: IntArray,
    unit_of: IntArray,
    weights: tuple[IntArray, IntArray],
    latency_of: IntArray,
    load_of: IntArray,
) -> tuple[float, float]:
    """Set the two placements to the best; return their values in s.

    Units are placed depth first. Only weights cut a branch off: of tensors, an operator more can
    make a device hold less, such as the maker of a view that was received.
    """
    n, devices, units = unit_of.shape[0], room.shape[0], weights[0].shape[0] - 1
    home = np.full(units, -1, dtype=np.int64)
    used = np.zeros((devices, m.weight_bytes.shape[0]), dtype=np.int64)
    held = np.zeros(devices, dtype=np.int64)
    device_of, change = np.empty(n, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    latency_s, load_s, unit = np.inf, np.inf, 0
    while unit >= 0:
        old = home[unit]
        if old >= 0:
            held[old] += _weights_change(m, weights, unit, used[old], -1)
        new = old + 1
        if new == devices:
            home[unit] = -1
            unit -= 1
            continue
        home[unit] = new
        held[new] += _weights_change(m, weights, unit, used[new], 1)
        if held[new] > room[new]:
            continue
        if unit + 1 < units:
            unit += 1
            continue
        device_of[:] = home[unit_of]
        seconds, largest_s = _costs_of(t, m, log, room, device_of, change)
        if seconds < latency_s:
            latency_s, latency_of[:] = seconds, device_of
        if largest_s < load_s:
            load_s, load_of[:] = largest_s, device_of
    return latency_s, load_s
