"""Combine partitions that do not save enough: fewer pieces, fewer transfers."""

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.kernels import peak_on_device, schedule
from fxpart.cost.tables import CostTables
from fxpart.graph import IntArray, OpGraph, csr
from fxpart.modes.local_search import SearchTables
from fxpart.modes.units import Units
from fxpart.partitions import partition_by_device

__all__ = ["combine"]

_ROUNDING = 1e-12
_ROUNDS = 4
"""Most times that all partitions are tried: joined ones may join again. Few models take a third."""


def combine(graph: OpGraph, tables: SearchTables, device_of: IntArray) -> int:
    """Change `device_of` so that partitions join a neighbour; return how many did.

    A partition moves to the device of one that it reads from or that reads from it if less is
    transferred, every device holds what it then has, and the latency grows by at most `min_gain`
    of what it was at the start: a partition that saves no more is not worth having. So the latency
    is at most 1 + `min_gain` x joins times as high in the end. Torch's `cost_aware` combines with a
    gain of 0.
    """
    worth_s = -1.0
    joins = 0
    for _ in range(_ROUNDS):
        placed = partition_by_device(graph, device_of)
        members: list[list[int]] = [[] for _ in range(placed.n_partitions)]
        for op, partition in enumerate(placed.partition_of.tolist()):
            members[partition].append(op)
        # Small partitions first: they are what disturbs.
        members.sort(key=len)
        made, worth_s = _combine_once(tables, device_of, csr(members), graph.group, worth_s)
        joins += made
        if not made:
            break
    return joins


@compiled
def _sent_s(s: SearchTables, count: int) -> float:
    return float((s.log.sent_s[:count, 1] - s.log.sent_s[:count, 0]).sum())


@compiled
def _neighbours(t: CostTables, device_of: IntArray, mine: IntArray, devices: int) -> IntArray:
    """Return the devices that the operators read from, or that read from them."""
    near = np.zeros(devices, dtype=np.bool_)
    for op in mine:
        for i in range(t.read_start[op], t.read_start[op + 1]):
            if t.producer[t.reads[i]] >= 0:
                near[device_of[t.producer[t.reads[i]]]] = True
        for value in range(t.made_start[op], t.made_start[op + 1]):
            for j in range(t.reader_start[value], t.reader_start[value + 1]):
                near[device_of[t.readers[j]]] = True
    near[device_of[mine[0]]] = False
    return np.flatnonzero(near)


@compiled
def _combine_once(
    s: SearchTables, device_of: IntArray, units: Units, group: IntArray, worth_s: float
) -> tuple[int, float]:
    """Try each unit on the devices beside it; return how many moved, and what one must save.

    That is `worth_s`, or, if it is negative, `min_gain` of the latency found here.
    """
    start, ops = units
    latency, count = schedule(s.costs, device_of, s.log)
    sent_s, joins = _sent_s(s, count), 0
    if worth_s < 0.0:
        worth_s = latency * max(s.min_gain, _ROUNDING)
    for unit in range(start.shape[0] - 1):
        mine = ops[start[unit] : start[unit + 1]]
        home = device_of[mine[0]]
        for device in _neighbours(s.costs, device_of, mine, s.sizes.shape[0]):
            device_of[mine] = device
            found, count = schedule(s.costs, device_of, s.log)
            quieter = _sent_s(s, count)
            if (
                found <= latency + worth_s
                and quieter < sent_s * (1.0 - _ROUNDING)
                and (device_of[group] == device_of).all()
                and peak_on_device(s.memory, device_of, device, s.change) <= s.sizes[device]
                and peak_on_device(s.memory, device_of, home, s.change) <= s.sizes[home]
            ):
                latency, sent_s, home, joins = found, quieter, device, joins + 1
            else:
                device_of[mine] = home
    return joins, worth_s
