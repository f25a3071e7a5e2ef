"""Initial placement by list scheduling: each operator goes where its successors can end earliest.

Arabnejad, Barbosa: List scheduling algorithm for heterogeneous systems by an optimistic cost table.
IEEE Trans. Parallel Distrib. Syst. 25(3), 2014, doi:10.1109/TPDS.2013.57. Operators are processed
in graph order, as in the simulated schedule.
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
"""Most placements tried, each with less memory on devices that the previous one overfilled."""


class _State(NamedTuple):
    """State of devices and links while operators are placed."""

    device_free: FloatArray
    link_free: FloatArray
    finish_s: FloatArray
    arrival_s: FloatArray
    """Arrival of each value at each device, -1 if it was not sent. Shape (V, D)."""
    free_bytes: IntArray


@inlined
def _optimistic_s(t: CostTables) -> FloatArray:
    """Return the optimistic time from the end of each operator to the end of the model.

    It is indexed by the operator's device, and assumes that every later operator can choose its
    device freely. Shape (n, D).
    """
    n, devices = t.op_time_s.shape
    table = np.zeros((n, devices))
    for op in range(n - 1, -1, -1):
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                reader = t.readers[j]
                for device in range(devices):
                    least_s = np.inf
                    for other in range(devices):
                        remaining_s = table[reader, other] + t.op_time_s[reader, other]
                        if other != device:
                            remaining_s += t.link_latency_s[device, other]
                            remaining_s += t.value_bytes[value] * t.s_per_byte[device, other]
                        least_s = min(least_s, remaining_s)
                    table[op, device] = max(table[op, device], least_s)
    return table


@compiled
def _fetch(  # noqa: PLR0917 - inlined in the innermost loop
    t: CostTables, s: _State, device_of: IntArray, op: int, device: int, commit: bool
) -> float:
    """Return the start of `op` on `device`; with `commit`, its transfers occupy their links."""
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
    """Return the bytes of each group's weights at its first operator, shape (n,)."""
    weight_bytes = np.zeros(group.shape[0], dtype=np.int64)
    for op in range(group.shape[0]):
        for i in range(m.use_start[op], m.use_start[op + 1]):
            weight_bytes[group[op]] += m.weight_bytes[m.uses[i]]
    return weight_bytes


@compiled
def _place_greedily(
    t: CostTables, m: MemoryTables, group: IntArray, free_bytes: IntArray
) -> IntArray:
    """Return the device of each operator, -1 from the first one on that does not fit."""
    n, devices = t.op_time_s.shape
    after, weights = _optimistic_s(t), _weights_of_groups(m, group)
    s = _State(
        np.zeros(devices),
        np.zeros((devices, devices)),
        np.zeros(n),
        np.full((t.producer.shape[0], devices), -1.0),
        free_bytes.copy(),
    )
    device_of = np.full(n, -1, dtype=np.int64)
    for op in range(n):
        home = device_of[group[op]]
        if home < 0:
            earliest_s = np.inf
            for device in range(devices):
                if s.free_bytes[device] < weights[op]:
                    continue
                end_s = _fetch(t, s, device_of, op, device, False) + t.op_time_s[op, device]
                if end_s + after[op, device] < earliest_s:
                    earliest_s, home = end_s + after[op, device], device
            if home < 0:
                return device_of
            s.free_bytes[home] -= weights[op]
        start = _fetch(t, s, device_of, op, home, True)
        device_of[op] = home
        s.finish_s[op] = s.device_free[home] = start + t.op_time_s[op, home]
    return device_of


def list_placement(problem: Problem) -> IntArray | None:
    """Return the device of each operator, or None if no trial fits.

    Placing counts only weights; if a device then exceeds its memory at the peak, its memory is
    reduced by the excess for the next trial.
    """
    sizes = problem.topology.memory_bytes
    free_bytes = sizes.copy()
    for _ in range(_TRIALS):
        device_of = _place_greedily(problem.costs, problem.memory, problem.graph.group, free_bytes)
        if device_of.min() < 0:
            return None
        over = peak_bytes(problem.memory, device_of, len(sizes)) - sizes
        if (over <= 0).all():
            return device_of
        free_bytes -= np.maximum(over, 0)
    return None
