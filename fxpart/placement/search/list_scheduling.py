"""A first placement by list scheduling: each operator where it, and what follows, ends earliest.

Arabnejad, Barbosa: List scheduling algorithm for heterogeneous systems by an optimistic cost
table. IEEE Trans. Parallel Distrib. Syst. 25(3), 2014, doi:10.1109/TPDS.2013.57. Operators are
taken in graph order, which is the order that the simulated schedule runs them in.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled, inlined

__all__ = ["list_placement"]

_TRIALS = 8
"""Placements tried, each with less room on devices where the one before held too much at once."""


class _State(NamedTuple):
    """Devices and links while operators are placed one by one."""

    device_free: FloatArray
    link_free: FloatArray
    finish_s: FloatArray
    arrival_s: FloatArray
    """Shape (V, D), -1 where a value was not sent."""
    room: IntArray


@inlined
def _optimistic_s(t: CostTables) -> FloatArray:
    """Return the least time from the end of each operator to the end of the model, shape (n, D).

    By device of the operator, as if every later operator could choose its own freely.
    """
    n, devices = t.op_time_s.shape
    table = np.zeros((n, devices))
    for op in range(n - 1, -1, -1):
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                reader = t.readers[j]
                for here in range(devices):
                    least = np.inf
                    for other in range(devices):
                        takes = table[reader, other] + t.op_time_s[reader, other]
                        if other != here:
                            takes += t.link_latency_s[here, other]
                            takes += t.value_bytes[value] * t.s_per_byte[here, other]
                        least = min(least, takes)
                    table[op, here] = max(table[op, here], least)
    return table


@compiled
def _fetch(  # noqa: PLR0917 - inlined in the innermost loop
    t: CostTables, s: _State, device_of: IntArray, op: int, device: int, commit: bool
) -> float:
    """Return when `op` could begin on `device`; with `commit`, its transfers take their links."""
    start = s.device_free[device]
    for i in range(t.read_start[op], t.read_start[op + 1]):
        value = t.reads[i]
        maker = t.producer[value]
        if maker < 0:
            continue
        available_s, source = s.finish_s[maker], device_of[maker]
        if source != device:
            available_s = s.arrival_s[value, device]
            if available_s < 0.0:
                available_s = max(s.finish_s[maker], s.link_free[source, device])
                available_s += t.link_latency_s[source, device]
                available_s += t.value_bytes[value] * t.s_per_byte[source, device]
                if commit:
                    s.link_free[source, device] = available_s
                    s.arrival_s[value, device] = available_s
        start = max(start, available_s)
    return float(start)


@inlined
def _weights_of_groups(m: MemoryTables, group: IntArray) -> IntArray:
    """Return the bytes of the weights that each group uses, at its first operator, shape (n,)."""
    weight_bytes = np.zeros(group.shape[0], dtype=np.int64)
    for op in range(group.shape[0]):
        for i in range(m.use_start[op], m.use_start[op + 1]):
            weight_bytes[group[op]] += m.weight_bytes[m.uses[i]]
    return weight_bytes


@compiled
def _place(t: CostTables, m: MemoryTables, group: IntArray, room: IntArray) -> IntArray:
    """Return the device of each operator, -1 from the first one on that has no room."""
    n, devices = t.op_time_s.shape
    after, weights = _optimistic_s(t), _weights_of_groups(m, group)
    s = _State(
        np.zeros(devices),
        np.zeros((devices, devices)),
        np.zeros(n),
        np.full((t.producer.shape[0], devices), -1.0),
        room.copy(),
    )
    device_of = np.full(n, -1, dtype=np.int64)
    for op in range(n):
        home = device_of[group[op]]
        if home < 0:
            least = np.inf
            for device in range(devices):
                if s.room[device] < weights[op]:
                    continue
                ends = _fetch(t, s, device_of, op, device, False) + t.op_time_s[op, device]
                if ends + after[op, device] < least:
                    least, home = ends + after[op, device], device
            if home < 0:
                return device_of
            s.room[home] -= weights[op]
        start = _fetch(t, s, device_of, op, home, True)
        device_of[op] = home
        s.finish_s[op] = s.device_free[home] = start + t.op_time_s[op, home]
    return device_of


def list_placement(problem: Problem) -> IntArray | None:
    """Return the device of each operator, or None when no trial respects every device's memory.

    Room is counted in weights while placing; where a device then holds too much at its peak, it
    gets that much less room in the next trial.
    """
    sizes = problem.topology.memory_bytes
    room = sizes.copy()
    for _ in range(_TRIALS):
        device_of = _place(problem.costs, problem.memory, problem.graph.group, room)
        if device_of.min() < 0:
            return None
        over = peak_bytes(problem.memory, device_of, len(sizes)) - sizes
        if (over <= 0).all():
            return device_of
        room -= np.maximum(over, 0)
    return None
