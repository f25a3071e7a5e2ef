"""Minimize the largest load: stretches of a row, then repeated multilevel annealing.

Each round contracts the graph at random and anneals it level by level, from coarse to fine. A round
starts from scratch, from the best placement (contracting only units of one device, so that it
survives, as in the iterated multilevel scheme of Walshaw, doi:10.1007/s10732-005-5427-8), or from
two good ones (contracting only units on whose device both agree, as in KaHyPar-E,
doi:10.1145/3205455.3205475).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.placement.published.anneal import anneal_loads
from fxpart.placement.published.stretches import least_stretches
from fxpart.placement.search.coarsen import levels
from fxpart.placement.search.elite import Elite
from fxpart.placement.search.load_tables import LoadTables, loads_of

__all__ = ["LoadSearch", "best_stretches", "fresh"]

_ROW_UNITS = 4096
"""Most units for which stretches are tried, since the time is quadratic."""
_HEATS = (0.003, 0.01, 0.03)
_COLD = 1e-4
_BLUNT, _SHARP = 8.0, 200.0
_COARSE = 12
"""Clusters per device at the coarsest level."""
_STEPS_A_UNIT, _LEAST_STEPS, _MOST_STEPS = 1000, 50_000, 400_000
_SLOW = 3.0
"""Starts from scratch avoid devices slower than the fastest by more than this factor."""


def best_stretches(tables: LoadTables, rows: Iterable[IntArray]) -> IntArray | None:
    """Return the best placement of stretches of any of `rows`, or None.

    Devices are equal accelerators, which pay for transfers, then equal CPU cores.
    """
    if len(tables.size_bytes) > _ROW_UNITS:
        return None
    accelerators = int(tables.pays.sum())
    first, count = np.array([[0, accelerators], [accelerators, len(tables.pays) - accelerators]])
    best_of, best_s = None, np.inf
    for row in rows:
        load_s, device_of = least_stretches(tables, row, first, count, best_s)
        if load_s < best_s:
            best_of, best_s = device_of, load_s
    return best_of


@dataclass(eq=False, slots=True)
class LoadSearch:
    """A search for the smallest largest load, a round at a time. Deterministic for a seed."""

    tables: LoadTables
    seed: int = 0
    elite: Elite = field(default_factory=Elite)
    """The best placements found, with distinct loads, best first."""
    _round: int = 0

    @property
    def best_s(self) -> float:
        """The largest load of the best placement; infinite if there is none yet."""
        return self.elite.best_s

    @property
    def is_exhausted(self) -> bool:
        """Whether some unit fits nowhere; otherwise a random start may fit."""
        t = self.tables
        possible = np.isfinite(t.time_s) & (t.size_bytes[:, None] <= t.room_bytes)
        return not self.elite and not possible.any(axis=1).all()

    def take(self, device_of: IntArray) -> None:
        """Add a starting placement if it fits; `device_of` has a device per unit (U,)."""
        used_bytes = np.bincount(
            device_of, weights=self.tables.size_bytes, minlength=len(self.tables.room_bytes)
        )
        loads = loads_of(self.tables, device_of)
        if (used_bytes <= self.tables.room_bytes).all() and np.isfinite(loads).all():
            self.elite.keep(float(loads.max()), device_of)

    def round(self) -> None:
        """Run one round of the search."""
        number, seed = self._round, self.seed * 1_000_003 + self._round * 64 + 1
        self._round += 1
        if not self.elite or number % 4 == 1:
            start, labels = None, np.zeros(len(self.tables.size_bytes), dtype=np.int64)
        elif number % 4 == 3 and len(self.elite) > 1:
            other = self.elite[1 + number // 4 % (len(self.elite) - 1)]
            start = self.elite[0]
            labels = start * len(self.tables.room_bytes) + other
        else:
            start = self.elite[0 if number % 8 else (number // 8) % len(self.elite)]
            labels = start
        placed = self._annealed(start, labels, _HEATS[number % 3], seed)
        if placed is not None:
            self.elite.keep(float(loads_of(self.tables, placed).max()), placed)

    def _annealed(
        self, start: IntArray | None, labels: IntArray, heat: float, seed: int
    ) -> IntArray | None:
        devices = len(self.tables.room_bytes)
        coarse = levels(self.tables, labels, _COARSE * devices, seed)
        tables = [self.tables, *(table for table, _ in coarse)]
        if start is None:
            placed, heat = fresh(tables[-1], np.random.default_rng(seed)), 0.1
            if placed is None:
                return None
        else:
            placed = start
            for _, cluster_of in coarse:
                joined = np.empty(int(cluster_of.max()) + 1, dtype=np.int64)
                joined[cluster_of] = placed
                placed = joined
            placed = placed.copy()
        for level in range(len(tables) - 1, -1, -1):
            steps = _STEPS_A_UNIT * len(tables[level].size_bytes)
            steps = min(max(steps, _LEAST_STEPS), _MOST_STEPS)
            hot = heat if level == len(tables) - 1 else heat / 3
            anneal_loads(tables[level], placed, seed + level, steps, hot, _COLD, _BLUNT, _SHARP)
            if level:
                placed = placed[coarse[level - 1][1]]
        return placed


def fresh(t: LoadTables, random: np.random.Generator) -> IntArray | None:
    """Place units at random, the largest first; None if one does not fit."""
    device_of = np.full(len(t.size_bytes), -1, dtype=np.int64)
    free = t.room_bytes.copy()
    # Speed is judged by units that run everywhere.
    whole = t.time_s[np.isfinite(t.time_s).all(axis=1)].sum(axis=0)
    is_fast = whole <= _SLOW * whole.min()
    for unit in np.argsort(-t.size_bytes, kind="stable"):
        possible = np.isfinite(t.time_s[unit]) & (free >= t.size_bytes[unit])
        preferred = np.flatnonzero(possible & is_fast)
        choices = preferred if len(preferred) else np.flatnonzero(possible)
        if not len(choices):
            return None
        device = int(choices[random.integers(len(choices))])
        device_of[unit] = device
        free[device] -= t.size_bytes[unit]
    return device_of
