"""The two inner loops of every search: the simulated schedule and the peak memory of a device.

Both are a single pass over the operators in topological order: O(n + reads) each. Arrays are those
of `fxpart.cost.tables.CostTables`; `device_of` is the device of each operator.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.support.compiled import compiled

__all__ = [
    "ScheduleLog",
    "device_memory",
    "peak_on_device",
    "schedule",
    "schedule_log",
]

RESIDENT = -2
"""Marks the storage of an input or a weight: resident, not counted as live."""


class ScheduleLog(NamedTuple):
    """Output buffers of `schedule`, allocated once and reused by many simulations."""

    start_s: FloatArray
    """Shape (n,)."""
    finish_s: FloatArray
    """Shape (n,)."""
    arrival_s: FloatArray
    """Arrival of each value at each device, shape (V, D); valid only for values that were sent."""
    sent: IntArray
    """Value, source and target of each transfer, shape (reads, 3)."""
    sent_s: FloatArray
    """Start and finish of each transfer, shape (reads, 2)."""


def schedule_log(t: CostTables) -> ScheduleLog:
    """Return an empty log for the graph and topology of `t`."""
    n, devices = t.op_time_s.shape
    return ScheduleLog(
        np.zeros(n),
        np.zeros(n),
        np.full((len(t.producer), devices), -1.0),
        np.zeros((len(t.reads), 3), dtype=np.int64),
        np.zeros((len(t.reads), 2)),
    )


@compiled
def schedule(t: CostTables, device_of: IntArray, log: ScheduleLog) -> tuple[float, int]:
    """Simulate one input through the model; return (latency in s, number of transfers).

    Each device runs its operators one at a time in graph order, each ordered pair of devices
    carries one transfer at a time, and a value is sent to a device at most once, as soon as it is
    produced. The host launches the operators of all devices in graph order, and no operator begins
    before its launch. Fills `log`.
    """
    start_s, finish_s, arrival_s, sent, sent_s = log
    devices = t.op_time_s.shape[1]
    device_free = np.zeros(devices)
    link_free = np.zeros((devices, devices))
    latency, count = 0.0, 0
    for op in range(device_of.shape[0]):
        device = device_of[op]
        start = max(device_free[device], t.issue_s[op])
        for i in range(t.read_start[op], t.read_start[op + 1]):
            value = t.reads[i]
            maker = t.producer[value]
            if maker >= 0:
                available_s = (
                    finish_s[maker] if device_of[maker] == device else arrival_s[value, device]
                )
                start = max(start, available_s)
        finish = start + t.op_time_s[op, device]
        start_s[op], finish_s[op] = start, finish
        device_free[device] = finish
        latency = max(latency, finish)
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                arrival_s[value, device_of[t.readers[j]]] = -1.0
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                target = device_of[t.readers[j]]
                if target == device or arrival_s[value, target] >= 0.0:
                    continue
                begin = max(finish, link_free[device, target])
                end = begin + t.link_latency_s[device, target]
                end += t.value_bytes[value] * t.s_per_byte[device, target]
                link_free[device, target] = end
                arrival_s[value, target] = end
                sent[count, 0], sent[count, 1], sent[count, 2] = value, device, target
                sent_s[count, 0], sent_s[count, 1] = begin, end
                count += 1
    return latency, count


@compiled
def device_memory(  # noqa: PLR0912 - one loop, compiled whole
    m: MemoryTables, device_of: IntArray, device: int, change: IntArray
) -> tuple[int, int]:
    """Fill `change` (n + 1,) and return (resident bytes, operators) of one device.

    The weights used there (tied ones once) and the inputs read there are resident. `change[i]` is
    the change in bytes of live tensors when operator i of the whole graph begins. A storage lives
    from its producer, even if that is on another device, through its last use on the device. On its
    own device it also lives as long as Python references it. Graph outputs live to the end.
    """
    n = device_of.shape[0]
    change[:] = 0
    root = np.full(m.producer.shape[0], -1, dtype=np.int64)
    last = np.zeros(m.producer.shape[0], dtype=np.int64)
    weight_seen = np.zeros(m.weight_bytes.shape[0], dtype=np.bool_)
    resident, operators = 0, 0
    for op in range(n):
        if device_of[op] != device:
            continue
        operators += 1
        for i in range(m.use_start[op], m.use_start[op + 1]):
            if not weight_seen[m.uses[i]]:
                weight_seen[m.uses[i]] = True
                resident += m.weight_bytes[m.uses[i]]
        for i in range(m.read_start[op], m.read_start[op + 1]):
            value = m.reads[i]
            if root[value] == -1:
                if m.producer[value] < 0:
                    root[value] = RESIDENT
                    resident += m.alloc_bytes[value]
                else:
                    root[value] = value
                    change[m.producer[value]] += m.value_bytes[value]
            if root[value] >= 0:
                last[root[value]] = max(last[root[value]], op)
        for value in range(m.made_start[op], m.made_start[op + 1]):
            base = m.base[value]
            if base >= 0:
                root[value] = root[base]
            else:
                root[value] = value
                change[op] += m.alloc_bytes[value]
            if root[value] >= 0:
                # Variables reference the original, not a received copy.
                is_own = device_of[m.producer[root[value]]] == device
                until = max(op, m.held[value]) if is_own else op
                until = n - 1 if m.is_output[value] else until
                last[root[value]] = max(last[root[value]], until)
    for value in range(m.producer.shape[0]):
        if root[value] == value:
            local = device_of[m.producer[value]] == device
            change[last[value] + 1] -= m.alloc_bytes[value] if local else m.value_bytes[value]
    return resident, operators


@compiled
def peak_on_device(m: MemoryTables, device_of: IntArray, device: int, change: IntArray) -> int:
    """Return the peak memory of the device in bytes; 0 if it has no operators."""
    resident, operators = device_memory(m, device_of, device, change)
    if operators == 0:
        return 0
    live, peak = 0, 0
    for op in range(device_of.shape[0]):
        live += change[op]
        peak = max(peak, live)
    return resident + peak
