"""A latency that no placement can beat, and the critical path of one placement."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.tables import CostTables
from fxpart.graph import FloatArray, IntArray

__all__ = ["critical_path_s", "lower_bound_s"]


@compiled
def _longest_path(t: CostTables, time_s: FloatArray) -> float:
    """Return the longest chain of operators that read from each other, nothing else counted."""
    finish = np.zeros(time_s.shape[0])
    longest = 0.0
    for op in range(time_s.shape[0]):
        start = 0.0
        for i in range(t.read_start[op], t.read_start[op + 1]):
            maker = t.producer[t.reads[i]]
            if maker >= 0:
                start = max(start, finish[maker])
        finish[op] = start + time_s[op]
        longest = max(longest, finish[op])
    return longest


@compiled
def critical_path_s(t: CostTables, device_of: IntArray) -> float:
    """Return the longest path of one placement in seconds, transfers included.

    As if a device ran any number of operators at once and a link carried any number of transfers.
    """
    finish = np.zeros(device_of.shape[0])
    longest = 0.0
    for op in range(device_of.shape[0]):
        here, start = device_of[op], 0.0
        for i in range(t.read_start[op], t.read_start[op + 1]):
            value = t.reads[i]
            maker = t.producer[value]
            if maker >= 0:
                there = finish[maker]
                if device_of[maker] != here:
                    there += t.link_latency_s[device_of[maker], here]
                    there += t.value_bytes[value] * t.s_per_byte[device_of[maker], here]
                start = max(start, there)
        finish[op] = start + t.op_time_s[op, here]
        longest = max(longest, finish[op])
    return longest


def lower_bound_s(t: CostTables) -> float:
    """Return a latency in seconds that no placement on these devices can beat.

    The larger of two bounds. The longest path with every operator on its fastest device and no
    transfer. And the work: with shares y of the devices that add to 1, any placement takes at
    least the sum over operators of the least ``y_d * time_d`` (linear programming duality); the
    shares are the devices' speeds on the whole model, which for equal devices gives work / D.
    """
    path = _longest_path(t, np.ascontiguousarray(t.op_time_s.min(axis=1)))
    totals = t.op_time_s.sum(axis=0)
    if not (totals > 0).all():
        return path
    share = (1.0 / totals) / (1.0 / totals).sum()
    work = float((t.op_time_s * share).min(axis=1).sum())
    return max(float(path), work)
