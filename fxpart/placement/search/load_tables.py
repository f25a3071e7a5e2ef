"""Placement as hypergraph partitioning: units with times, connected by outputs.

A *unit* is a set of operators that share a device. An *output* connects the units that produce and
read it; if these are on several devices, each of the devices that pays for transfers pays its time
once.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, csr
from fxpart.core.workload import Workload
from fxpart.support.compiled import compiled

__all__ = ["LoadTables", "coarser", "load_tables", "loads_of", "unit_tables"]


class LoadTables(NamedTuple):
    """U units, E outputs, D devices. A named tuple, as numba accepts those."""

    unit_start: IntArray
    """CSR by unit: the outputs that it produces or reads."""
    unit_outputs: IntArray
    output_start: IntArray
    """CSR by output: the distinct units that it connects, at least two."""
    output_units: IntArray
    output_s: FloatArray
    """Shape (E,)."""
    time_s: FloatArray
    """Shape (U, D)."""
    size_bytes: IntArray
    """Shape (U,)."""
    room_bytes: IntArray
    """Shape (D,)."""
    pays: npt.NDArray[np.bool_]
    """Whether a device pays for transfers. Shape (D,)."""


def unit_tables(workload: Workload) -> tuple[LoadTables, IntArray]:
    """Return the tables of a workload's colours, and the unit of each operator (n,)."""
    w = workload
    _, unit_of = np.unique(w.colour, return_inverse=True)
    unit_of = unit_of.astype(np.int64)
    units, devices = int(unit_of.max()) + 1, w.n_devices
    joined = np.concatenate(
        [
            np.stack([w.sources, unit_of[w.targets]], axis=1),
            np.stack([np.arange(w.n_ops), unit_of], axis=1),
        ]
    )
    time_s = np.zeros((units, devices))
    np.add.at(time_s, unit_of, w.times)
    size = np.zeros(units, dtype=np.int64)
    np.add.at(size, unit_of, w.size_bytes)
    pays = np.arange(devices) < w.accelerators
    room = np.where(pays, w.memory_bytes, np.iinfo(np.int64).max)
    return load_tables(joined, w.move_s, time_s, size, room, pays), unit_of


def coarser(tables: LoadTables, cluster_of: IntArray) -> LoadTables:
    """Return the tables of clusters of units; `cluster_of` (U,) has no gaps."""
    t, count = tables, int(cluster_of.max()) + 1
    outputs = np.repeat(np.arange(len(t.output_s)), np.diff(t.output_start))
    joined = np.stack([outputs, cluster_of[t.output_units]], axis=1)
    time_s = np.zeros((count, t.time_s.shape[1]))
    np.add.at(time_s, cluster_of, t.time_s)
    size = np.zeros(count, dtype=np.int64)
    np.add.at(size, cluster_of, t.size_bytes)
    return load_tables(joined, t.output_s, time_s, size, t.room_bytes, t.pays)


def load_tables(  # noqa: PLR0917 - the columns of a table
    joined: IntArray,
    output_s: FloatArray,
    time_s: FloatArray,
    size_bytes: IntArray,
    room_bytes: IntArray,
    pays: npt.NDArray[np.bool_],
) -> LoadTables:
    """Return the tables of units and outputs; outputs that connect the same units are merged."""
    pairs = np.unique(joined, axis=0)
    members: dict[int, list[int]] = {}
    for output, unit in pairs.tolist():
        members.setdefault(output, []).append(unit)
    weight_of: dict[tuple[int, ...], float] = {}
    for output, units in members.items():
        if len(units) > 1 and output_s[output] > 0:
            key = tuple(units)
            weight_of[key] = weight_of.get(key, 0.0) + float(output_s[output])
    output_start, output_units = csr([list(units) for units in weight_of])
    outputs_of: list[list[int]] = [[] for _ in range(len(time_s))]
    for output, joined_here in enumerate(weight_of):
        for unit in joined_here:
            outputs_of[unit].append(output)
    unit_start, unit_outputs = csr(outputs_of)
    return LoadTables(
        unit_start,
        unit_outputs,
        output_start,
        output_units,
        np.array(list(weight_of.values()), dtype=np.float64),
        time_s,
        size_bytes,
        room_bytes,
        pays,
    )


@compiled
def loads_of(t: LoadTables, device_of: IntArray) -> FloatArray:
    """Return the load of each device in s, shape (D,)."""
    devices = t.time_s.shape[1]
    loads = np.zeros(devices)
    for unit in range(device_of.shape[0]):
        loads[device_of[unit]] += t.time_s[unit, device_of[unit]]
    seen = np.full(devices, -1, dtype=np.int64)
    for output in range(t.output_s.shape[0]):
        first, last = t.output_start[output], t.output_start[output + 1]
        is_cut = False
        for i in range(first + 1, last):
            is_cut |= device_of[t.output_units[i]] != device_of[t.output_units[first]]
        if not is_cut:
            continue
        for i in range(first, last):
            device = device_of[t.output_units[i]]
            if seen[device] != output:
                seen[device] = output
                if t.pays[device]:
                    loads[device] += t.output_s[output]
    return loads
