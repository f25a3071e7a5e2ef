"""Divide a row of units into stretches, one per device, with the smallest largest load (exact)."""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.placement.search.load_tables import LoadTables
from fxpart.support.compiled import compiled

__all__ = ["least_stretches"]


@compiled
def least_stretches(  # noqa: PLR0912 - compiled: one loop, all by position
    t: LoadTables, row: IntArray, kind_first: IntArray, kind_count: IntArray, most_s: float
) -> tuple[float, IntArray]:
    """Return the largest load and the device of each unit (U,); infinite if there is no division.

    `row` (U,) is the order of units. Devices are of two kinds, ``kind_count[k]`` of each, numbered
    from ``kind_first[k]``. Dynamic programming over ends and devices used; the load of a stretch
    includes its transfers: O(U^2 x pins + U^2 x D). Loads above `most_s` are pruned.
    """
    units = row.shape[0]
    many, few = kind_count[0], kind_count[1]
    best_load_s = np.full((many + 1, few + 1, units + 1), np.inf)
    begin = np.full((many + 1, few + 1, units + 1), -1, dtype=np.int32)
    kind_of = np.full((many + 1, few + 1, units + 1), -1, dtype=np.int8)
    for a in range(many + 1):
        for b in range(few + 1):
            best_load_s[a, b, 0] = 0.0
    outputs = t.output_s.shape[0]
    count = np.zeros(outputs, dtype=np.int32)
    for first in range(units):
        for kind in range(2):
            if kind_count[kind] == 0:
                continue
            device = kind_first[kind]
            alone, moved, used_bytes = 0.0, 0.0, 0
            stop = units
            for end in range(first, units):
                unit = row[end]
                alone += t.time_s[unit, device]
                used_bytes += t.size_bytes[unit]
                if t.pays[device]:
                    for i in range(t.unit_start[unit], t.unit_start[unit + 1]):
                        output = t.unit_outputs[i]
                        count[output] += 1
                        joined = t.output_start[output + 1] - t.output_start[output]
                        if count[output] == 1:
                            moved += t.output_s[output]
                        if count[output] == joined:
                            moved -= t.output_s[output]
                load = alone + moved
                if alone > most_s or used_bytes > t.room_bytes[device]:
                    stop = end + 1
                    break
                if load > most_s:
                    continue
                for a in range(many + 1):
                    for b in range(few + 1):
                        p, q = a - (kind == 0), b - (kind == 1)
                        if p < 0 or q < 0:
                            continue
                        largest = max(best_load_s[p, q, first], load)
                        if largest < best_load_s[a, b, end + 1]:
                            best_load_s[a, b, end + 1] = largest
                            begin[a, b, end + 1] = first
                            kind_of[a, b, end + 1] = kind
            if t.pays[device]:
                for end in range(first, stop):
                    for i in range(t.unit_start[row[end]], t.unit_start[row[end] + 1]):
                        count[t.unit_outputs[i]] = 0
    device_of = np.zeros(units, dtype=np.int64)
    a, b, end = many, few, units
    if not np.isfinite(best_load_s[a, b, end]):
        return np.inf, device_of
    while end > 0:
        first, kind = begin[a, b, end], kind_of[a, b, end]
        a -= kind == 0
        b -= kind == 1
        for i in range(first, end):
            device_of[row[i]] = kind_first[kind] + (a if kind == 0 else b)
        end = first
    return best_load_s[many, few, units], device_of
