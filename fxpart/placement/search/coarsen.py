"""Coarsening: clusters of strongly connected units that move together in coarse levels."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.placement.search.load_tables import LoadTables, coarser
from fxpart.support.compiled import compiled
from fxpart.support.random_numbers import below, chance

__all__ = ["Level", "levels"]

_LARGE = 64
"""Outputs that connect more units than this are ignored, as they carry little information."""
_SHRINK = 0.6
_SHARE = 0.35
"""Largest cluster, as a share of a device's fair share of the time."""

Level = tuple[LoadTables, IntArray]
"""Tables of clusters, and the cluster of each unit of the level below."""


def levels(tables: LoadTables, labels: IntArray, target: int, seed: int) -> list[Level]:
    """Return successively coarser tables, until there are at most `target` clusters.

    Only units with equal `labels` (U,) are joined, so a placement with one device per label is also
    a placement of the coarse tables.
    """
    coarse_levels: list[Level] = []
    fastest = tables.time_s.min(axis=1)
    devices = tables.time_s.shape[1]
    most_s = max(_SHARE * float(fastest.sum()) / devices, float(fastest.max()))
    most_bytes = int(0.5 * float(tables.room_bytes.min()))
    while len(tables.size_bytes) > target:
        units = len(tables.size_bytes)
        target_clusters = max(target, int(units * _SHRINK))
        cluster_of = _clusters(
            tables,
            labels,
            tables.time_s.min(axis=1),
            most_s,
            most_bytes,
            target_clusters,
            seed + len(coarse_levels),
        )
        count = int(cluster_of.max()) + 1
        if count > 0.95 * units:
            break
        tables = coarser(tables, cluster_of)
        coarse_labels = np.empty(count, dtype=np.int64)
        coarse_labels[cluster_of] = labels
        labels = coarse_labels
        coarse_levels.append((tables, cluster_of))
    return coarse_levels


@compiled
def _clusters(  # noqa: PLR0912, PLR0917 - compiled: one loop, all by position
    t: LoadTables,
    labels: IntArray,
    weight_s: FloatArray,
    most_s: float,
    most_bytes: int,
    target: int,
    seed: int,
) -> IntArray:
    """Return the cluster of each unit, numbered without gaps.

    Units in random order join the cluster with the strongest connection relative to its weight.
    """
    state = chance(seed)
    units = t.size_bytes.shape[0]
    order = np.arange(units)
    for i in range(units - 1, 0, -1):
        j = below(state, i + 1)
        order[i], order[j] = order[j], order[i]
    cluster_of = np.arange(units)
    members = np.ones(units, dtype=np.int64)
    time_s, size = weight_s.copy(), t.size_bytes.copy()
    rating = np.zeros(units)
    touched = np.empty(units, dtype=np.int64)
    typical = weight_s.sum() / units + 1e-30
    clusters = units
    for unit in order:
        if clusters <= target:
            break
        if members[cluster_of[unit]] != 1 or cluster_of[unit] != unit:
            continue
        count = 0
        for i in range(t.unit_start[unit], t.unit_start[unit + 1]):
            output = t.unit_outputs[i]
            first, last = t.output_start[output], t.output_start[output + 1]
            if last - first > _LARGE:
                continue
            tie = t.output_s[output] / (last - first - 1)
            for j in range(first, last):
                other = cluster_of[t.output_units[j]]
                if other != unit and labels[t.output_units[j]] == labels[unit]:
                    if rating[other] == 0.0:
                        touched[count] = other
                        count += 1
                    rating[other] += tie
        best, best_strength = -1, 0.0
        for i in range(count):
            other = touched[i]
            fits = time_s[other] + time_s[unit] <= most_s and size[other] + size[unit] <= most_bytes
            strength = rating[other] / np.sqrt((time_s[other] + typical) * (time_s[unit] + typical))
            rating[other] = 0.0
            if fits and strength > best_strength:
                best, best_strength = int(other), float(strength)
        if best >= 0:
            cluster_of[unit] = best
            members[best] += 1
            time_s[best] += time_s[unit]
            size[best] += size[unit]
            clusters -= 1
    number = np.full(units, -1, dtype=np.int64)
    count = 0
    for position in range(units):
        if number[cluster_of[position]] < 0:
            number[cluster_of[position]] = count
            count += 1
        cluster_of[position] = number[cluster_of[position]]
    return cluster_of
