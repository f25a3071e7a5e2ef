"""Minimize the time of one sample, where each accelerator runs its operators as one piece."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, csr, grouped
from fxpart.core.workload import Workload
from fxpart.cost.blocking import latency_of_pieces
from fxpart.placement.published.unit_orders import rows
from fxpart.placement.search.coarsen import levels
from fxpart.placement.search.elite import Elite
from fxpart.placement.search.load_tables import LoadTables, unit_tables
from fxpart.support.compiled import compiled
from fxpart.support.random_numbers import below, chance, share

__all__ = ["PieceSearch", "chain_pieces"]

_HEATS = (0.02, 0.005, 0.002)
_COLD = 1e-5
_CORE = -1


class PieceTables(NamedTuple):
    """Tables for the time of one sample: n operators, m edges."""

    start: IntArray
    """CSR by operator: its readers."""
    after: IntArray
    before_start: IntArray
    """CSR by operator: its producers."""
    before: IntArray
    accelerator_s: FloatArray
    core_s: FloatArray
    move_s: FloatArray


def piece_tables(workload: Workload) -> PieceTables:
    """Return the tables of a workload."""
    after: list[list[int]] = [[] for _ in range(workload.n_ops)]
    before: list[list[int]] = [[] for _ in range(workload.n_ops)]
    for u, v in zip(workload.sources.tolist(), workload.targets.tolist(), strict=True):
        after[u].append(v)
        before[v].append(u)
    return PieceTables(
        *csr(after), *csr(before), workload.accelerator_s, workload.core_s, workload.move_s
    )


@compiled
def anneal_pieces(  # noqa: PLR0912, PLR0917 - compiled code takes no keywords
    t: PieceTables,
    unit_start: IntArray,
    unit_ops: IntArray,
    size_bytes: IntArray,
    room_bytes: int,
    pieces: IntArray,
    count: int,
    seed: int,
    steps: int,
    hot: float,
    cold: float,
) -> None:
    """Anneal `pieces` (n,) in place to the fastest found.

    A step moves one unit, usually to the piece of a neighbouring operator or to the CPU.
    Temperatures are relative to the time.
    """
    state = chance(seed)
    units = size_bytes.shape[0]
    used_bytes = np.zeros(count, dtype=np.int64)
    for unit in range(units):
        if pieces[unit_ops[unit_start[unit]]] >= 0:
            used_bytes[pieces[unit_ops[unit_start[unit]]]] += size_bytes[unit]
    latency = latency_of_pieces(
        t.start, t.after, t.accelerator_s, t.core_s, t.move_s, pieces, count
    )
    best, best_of = latency, pieces.copy()
    cooled = (cold / hot) ** (1.0 / max(1, steps))
    temperature = hot
    for _ in range(steps):
        temperature *= cooled
        unit = below(state, units)
        first, last = unit_start[unit], unit_start[unit + 1]
        old = pieces[unit_ops[first]]
        op = unit_ops[first + below(state, last - first)]
        near = t.start[op + 1] - t.start[op]
        nearby = near + t.before_start[op + 1] - t.before_start[op]
        draw = below(state, 16)
        new = -1
        if draw == 0:
            new = below(state, count)
        elif draw > 4 and nearby > 0:
            pick = below(state, nearby)
            if pick < near:
                new = pieces[t.after[t.start[op] + pick]]
            else:
                new = pieces[t.before[t.before_start[op] + pick - near]]
        if new == old or (new >= 0 and used_bytes[new] + size_bytes[unit] > room_bytes):
            continue
        for i in range(first, last):
            pieces[unit_ops[i]] = new
        new_latency = latency_of_pieces(
            t.start, t.after, t.accelerator_s, t.core_s, t.move_s, pieces, count
        )
        if new_latency > latency and new_latency - latency > -temperature * best * np.log(
            share(state) + 1e-12
        ):
            for i in range(first, last):
                pieces[unit_ops[i]] = old
            continue
        latency = new_latency
        if old >= 0:
            used_bytes[old] -= size_bytes[unit]
        if new >= 0:
            used_bytes[new] += size_bytes[unit]
        if latency < best * (1 - 1e-12):
            best = latency
            best_of[:] = pieces
    pieces[:] = best_of


@compiled
def _chain(t: LoadTables, row: IntArray, core_s: FloatArray, count: int) -> tuple[float, IntArray]:  # noqa: PLR0912 - compiled: one loop, all by position
    """Return the least sum of times along a row, and the piece of each unit (-1 on the CPU)."""
    units = row.shape[0]
    best_s = np.full((count + 1, units + 1), np.inf)
    begin = np.full((count + 1, units + 1), -1, dtype=np.int64)
    best_s[:, 0] = 0.0
    joined = np.zeros(t.output_s.shape[0], dtype=np.int64)
    for first in range(units):
        for a in range(count + 1):
            on_core = best_s[a, first] + core_s[row[first]]
            if on_core < best_s[a, first + 1]:
                best_s[a, first + 1] = on_core
                begin[a, first + 1] = -1
        seconds, used_bytes, stop = 0.0, 0, units
        for end in range(first, units):
            unit = row[end]
            seconds += t.time_s[unit, 0]
            used_bytes += t.size_bytes[unit]
            for i in range(t.unit_start[unit], t.unit_start[unit + 1]):
                output = t.unit_outputs[i]
                joined[output] += 1
                if joined[output] == 1:
                    seconds += t.output_s[output]
                if joined[output] == t.output_start[output + 1] - t.output_start[output]:
                    seconds -= t.output_s[output]
            if used_bytes > t.room_bytes[0] or not np.isfinite(seconds):
                stop = end + 1
                break
            for a in range(1, count + 1):
                if best_s[a - 1, first] + seconds < best_s[a, end + 1]:
                    best_s[a, end + 1] = best_s[a - 1, first] + seconds
                    begin[a, end + 1] = first
        for end in range(first, stop):
            for i in range(t.unit_start[row[end]], t.unit_start[row[end] + 1]):
                joined[t.unit_outputs[i]] = 0
    piece_of = np.full(units, -1, dtype=np.int64)
    a, end = count, units
    while end > 0:
        first = begin[a, end]
        if first < 0:
            end -= 1
            continue
        a -= 1
        for i in range(first, end):
            piece_of[row[i]] = a
        end = first
    return best_s[count, units], piece_of


def chain_pieces(
    workload: Workload, tables: LoadTables, unit_of: IntArray, seed: int = 0
) -> list[IntArray]:
    """Return the optimal pieces along several orders of the units; shape (n,) each."""
    core_s = np.bincount(unit_of, weights=workload.core_s).astype(np.float64)
    order = rows(workload.sources, workload.targets, workload.is_backward, unit_of, seed)
    return [_chain(tables, row, core_s, workload.accelerators)[1][unit_of] for row in order]


@dataclass(eq=False, slots=True)
class PieceSearch:
    """A search for the shortest time of one sample, a round at a time."""

    workload: Workload
    seed: int = 0
    steps: int = 30_000
    """Steps per level of a round."""
    elite: Elite = field(default_factory=Elite)
    """The fastest pieces found, with distinct times, fastest first."""
    _tables: PieceTables = field(init=False)
    _units: LoadTables = field(init=False)
    _unit_of: IntArray = field(init=False)
    _round: int = 0

    def __post_init__(self) -> None:
        """Start with everything on the CPU, and with the best along rows."""
        self._tables = piece_tables(self.workload)
        self._units, self._unit_of = unit_tables(self.workload)
        self.take(np.full(self.workload.n_ops, _CORE, dtype=np.int64))
        for pieces in chain_pieces(self.workload, self._units, self._unit_of, self.seed):
            self.take(pieces)

    @property
    def best_s(self) -> float:
        """The shortest time found."""
        return self.elite.best_s

    @property
    def is_exhausted(self) -> bool:
        """Whether there is no placement to continue from."""
        return not self.elite

    def take(self, pieces: IntArray) -> None:
        """Add starting pieces if they are acyclic; `pieces` (n,) is -1 on the CPU."""
        t = self._tables
        seconds = latency_of_pieces(
            t.start,
            t.after,
            t.accelerator_s,
            t.core_s,
            t.move_s,
            pieces,
            self.workload.accelerators,
        )
        if np.isfinite(seconds):
            self.elite.keep(float(seconds), pieces)

    def round(self) -> None:
        """Run one round of the search."""
        number, seed = self._round, self.seed * 1_000_003 + self._round * 64 + 1
        self._round += 1
        rank = 0 if number % 2 == 0 else (number // 2) % len(self.elite)
        pieces = self.elite[rank].copy()
        of_unit = np.empty(len(self._units.size_bytes), dtype=np.int64)
        of_unit[self._unit_of] = pieces
        target = max(12, len(of_unit) // (4, 8, 16, 2)[number % 4])
        coarse = levels(self._units, of_unit, target, seed)
        maps = [np.arange(len(of_unit), dtype=np.int64)]
        for _, cluster_of in coarse:
            maps.append(cluster_of[maps[-1]])
        heat = _HEATS[(number // 2) % 3]
        accelerators, room_bytes = self.workload.accelerators, self.workload.memory_bytes
        for level in range(len(maps) - 1, -1, -1):
            cluster = maps[level][self._unit_of]
            size = np.bincount(maps[level], weights=self._units.size_bytes).astype(np.int64)
            start, ops = grouped(cluster, np.arange(len(cluster)), len(size))
            hot = heat if level == len(maps) - 1 else heat / 2
            anneal_pieces(
                self._tables,
                start,
                ops,
                size,
                room_bytes,
                pieces,
                accelerators,
                seed + level,
                self.steps,
                hot,
                _COLD,
            )
        self.take(pieces)
