"""The operators and transfers that decide a simulated latency."""

import numpy as np
import numpy.typing as npt

from fxpart.compiled import compiled
from fxpart.cost.kernels import ScheduleLog
from fxpart.cost.tables import CostTables
from fxpart.graph import IntArray

__all__ = ["critical_path"]


@compiled
def _transfer_of(log: ScheduleLog, count: int, value: int, device: int) -> int:
    """Return which of the `count` transfers brings `value` to `device`."""
    # Values are sent as they are made, so in the order of their numbers.
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if log.sent[middle, 0] < value:
            low = middle + 1
        else:
            high = middle
    while log.sent[low, 2] != device:
        low += 1
    return low


@compiled
def _came_before(log: ScheduleLog, count: int, device_of: IntArray, devices: int) -> IntArray:
    """Return for each operator, then each transfer, the one before it on its device or link.

    -1 for the first. Transfers are numbered after the operators.
    """
    n = device_of.shape[0]
    before = np.full(n + count, -1, dtype=np.int64)
    on_device = np.full(devices, -1, dtype=np.int64)
    on_link = np.full((devices, devices), -1, dtype=np.int64)
    for op in range(n):
        before[op] = on_device[device_of[op]]
        on_device[device_of[op]] = op
    for i in range(count):
        source, target = log.sent[i, 1], log.sent[i, 2]
        before[n + i] = on_link[source, target]
        on_link[source, target] = n + i
    return before


@compiled
def _waited_for(t: CostTables, device_of: IntArray, log: ScheduleLog, count: int, op: int) -> int:
    """Return the operator or transfer whose result `op` waited for; -1 if for none.

    Times are compared exactly: a start is a copy of the finish that it waited for.
    """
    here = device_of[op]
    for i in range(t.read_start[op], t.read_start[op + 1]):
        value = t.reads[i]
        maker = t.producer[value]
        if maker < 0:
            continue
        if device_of[maker] == here:
            if log.finish_s[maker] == log.start_s[op]:
                return int(maker)
        elif log.arrival_s[value, here] == log.start_s[op]:
            return int(device_of.shape[0] + _transfer_of(log, count, value, here))
    return -1


@compiled
def critical_path(
    t: CostTables, device_of: IntArray, log: ScheduleLog, count: int
) -> npt.NDArray[np.bool_]:
    """Return which operators and which of the `count` transfers are on a longest path.

    Length n + count, the transfers last; `log` is what `fxpart.cost.kernels.schedule` has filled.
    From the operator that ends last back: what began as soon as another ended, waited for that
    one. What waits for what does not depend on times, so the sum of this path is a lower bound of
    the latency for any other times, and is the latency for these. O(n + reads).
    """
    n = device_of.shape[0]
    taken = np.zeros(n + count, dtype=np.bool_)
    before = _came_before(log, count, device_of, t.op_time_s.shape[1])
    here = int(np.argmax(log.finish_s))
    while here >= 0:
        taken[here] = True
        if here < n:
            if log.start_s[here] <= 0.0:
                break
            if before[here] >= 0 and log.finish_s[before[here]] == log.start_s[here]:
                here = before[here]
            else:
                here = _waited_for(t, device_of, log, count, here)
        else:
            maker = t.producer[log.sent[here - n, 0]]
            begin = log.sent_s[here - n, 0]
            here = maker if log.finish_s[maker] == begin else before[here]
    return taken
