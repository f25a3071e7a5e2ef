"""Combine partitions that are not worth their transfers: fewer pieces at about the same latency."""

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


def combine(graph: OpGraph, tables: SearchTables, device_of: IntArray, rounds: int = 4) -> None:
    """Change `device_of` so that partitions join a neighbour where that costs next to nothing.

    A partition moves to the device of one that it reads from or that reads from it if less is
    transferred, every device holds what it then has, and the latency is higher by at most
    `min_gain` of it: a partition that saves no more is not worth having. So torch's `cost_aware`
    combines, as long as the cost is not higher.
    """
    for _ in range(rounds):
        placed = partition_by_device(graph, device_of)
        members: list[list[int]] = [[] for _ in range(placed.n_partitions)]
        for op, partition in enumerate(placed.partition_of.tolist()):
            members[partition].append(op)
        # Small partitions first: they are what disturbs.
        members.sort(key=len)
        if not _combine_once(tables, device_of, csr(members), graph.group):
            return


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
def _combine_once(s: SearchTables, device_of: IntArray, units: Units, group: IntArray) -> bool:
    """Try each unit on the devices beside it; return whether any moved."""
    start, ops = units
    latency, count = schedule(s.costs, device_of, s.log)
    sent_s, moved = _sent_s(s, count), False
    for unit in range(start.shape[0] - 1):
        mine = ops[start[unit] : start[unit + 1]]
        home = device_of[mine[0]]
        for device in _neighbours(s.costs, device_of, mine, s.sizes.shape[0]):
            device_of[mine] = device
            found, count = schedule(s.costs, device_of, s.log)
            quieter = _sent_s(s, count)
            if (
                found <= latency * (1.0 + max(s.min_gain, _ROUNDING))
                and quieter < sent_s * (1.0 - _ROUNDING)
                and (device_of[group] == device_of).all()
                and peak_on_device(s.memory, device_of, device, s.change) <= s.sizes[device]
                and peak_on_device(s.memory, device_of, home, s.change) <= s.sizes[home]
            ):
                latency, sent_s, home, moved = found, quieter, device, True
            else:
                device_of[mine] = home
    return moved
