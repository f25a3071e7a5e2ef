"""How far a stage can extend before its device is full; evaluated only where memory can bind."""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.tables import MemoryTables
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.stretch_bytes import (
    Flight,
    KnownBytes,
    StretchScratch,
    UnitTables,
    known_needs,
)
from fxpart.support.compiled import compiled

__all__ = ["Reach", "ReachTable", "Reaches", "reach_in", "settle"]


class Reach(NamedTuple):
    """Stretches known to fit a device of one size, and known not to fit."""

    fits: IntArray
    """Furthest end of a stage from each unit that is known to fit. Length U + 1."""
    fails: IntArray
    """Nearest end that is known not to fit; U + 1 for none. Length U + 1."""
    memory_bytes: int
    flight: Flight


class Reaches(NamedTuple):
    """The `Reach` of several kinds of slots, row by row."""

    fits: IntArray
    """Shape (R, U + 1)."""
    fails: IntArray
    """Shape (R, U + 1)."""
    memory_bytes: IntArray
    """Length R."""
    flights: IntArray
    """The fields of `Flight`. Shape (R, 2)."""


@compiled
def reach_in(reaches: Reaches, row: int) -> Reach:
    """Return one row as a view."""
    flight = Flight(reaches.flights[row, 0], reaches.flights[row, 1])
    return Reach(reaches.fits[row], reaches.fails[row], reaches.memory_bytes[row], flight)


class ReachTable:
    """A `Reach` for each kind of slot of a row of units, made when it is first asked for."""

    def __init__(self, line: StageLine) -> None:
        """Prepare an empty table."""
        memory = line.stretches.memory
        of_use = line.unit_of[np.repeat(np.arange(len(line.unit_of)), np.diff(memory.use_start))]
        order = np.argsort(of_use, kind="stable")
        self._use_start = np.searchsorted(of_use[order], np.arange(line.n_units + 1))
        self._uses, self._weight_bytes = memory.uses[order], memory.weight_bytes
        self._row_of: dict[tuple[int, Flight], int] = {}
        no_rows = np.empty((0, line.n_units + 1), dtype=np.int64)
        numbers = np.empty(0, dtype=np.int64)
        self.reaches = Reaches(no_rows, no_rows, numbers, numbers.reshape(0, 2))
        """The rows so far; others may follow, which takes new arrays."""

    def row_of(self, memory_bytes: int, flight: Flight) -> int:
        """Return the row of a kind of slot. O(U + uses) for a new one, from weights only."""
        return self.rows_of([(memory_bytes, flight)])[0]

    def rows_of(self, kinds: list[tuple[int, Flight]]) -> list[int]:
        """Return the row of each kind of slot."""
        new = [kind for kind in dict.fromkeys(kinds) if kind not in self._row_of]
        if new:
            self._add(new)
        return [self._row_of[kind] for kind in kinds]

    def _add(self, new: list[tuple[int, Flight]]) -> None:
        count = self.reaches.fits.shape[1] - 1
        self._row_of |= {kind: len(self._row_of) + number for number, kind in enumerate(new)}
        fails = [
            _weights_fail(self._use_start, self._uses, self._weight_bytes, memory_bytes)
            for memory_bytes, _ in new
        ]
        added = Reaches(
            np.tile(np.arange(count + 1), (len(new), 1)),
            np.stack(fails),
            np.array([memory_bytes for memory_bytes, _ in new], dtype=np.int64),
            np.array([flight for _, flight in new], dtype=np.int64),
        )
        self.reaches = Reaches(*map(np.concatenate, zip(self.reaches, added, strict=True)))


@compiled
def _weights_fail(
    use_start: IntArray, uses: IntArray, weight_bytes: IntArray, memory_bytes: int
) -> IntArray:
    """Return the nearest cut up to which the weights from each unit exceed memory; U + 1 for none.

    Args:
        use_start: CSR starts into `uses` by unit. Length U + 1.
        uses: weights that each unit uses.
        weight_bytes: bytes of each weight.
        memory_bytes: memory of each device.

    """
    count = use_start.shape[0] - 1
    fails = np.full(count + 1, count + 1, dtype=np.int64)
    seen = np.zeros(weight_bytes.shape[0], dtype=np.int64)
    end, used = 0, 0
    for start in range(count):
        while end < count and used <= memory_bytes:
            for i in range(use_start[end], use_start[end + 1]):
                used += weight_bytes[uses[i]] if seen[uses[i]] == 0 else 0
                seen[uses[i]] += 1
            end += 1
        if used <= memory_bytes:
            break
        fails[start] = end
        for i in range(use_start[start], use_start[start + 1]):
            seen[uses[i]] -= 1
            used -= weight_bytes[uses[i]] if seen[uses[i]] == 0 else 0
    return fails


@compiled
def settle(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    scratch: StretchScratch,
    known: KnownBytes,
    cuts: IntArray,
    starts: IntArray,
    targets: IntArray,
    reach: Reach,
) -> None:
    """Determine for each cut of `starts` whether a stage may extend to `targets`, or else how far.

    Cut k of the row is cut ``cuts[k]`` of `units`.

    Without a backward, more units never need less memory, since values read from before the stretch
    stay received regardless of its length. So the furthest end is found by doubling and bisection,
    beginning with that of the previous start. It is not monotone in the start, as a view may be
    larger than its base.
    """
    last_fit, is_full = 0, False
    for start in starts:
        low, high, target = reach.fits[start], reach.fails[start], targets[start]
        # Where the previous stage is full before its target, this one is too, nearly at once.
        probe, step = (last_fit, 1) if is_full or high <= target else (target, 0)
        while high - low > 1 and low < target:
            if not low < probe < high:
                probe = (low + high) // 2
            needs = known_needs(m, units, scratch, known, cuts[start], cuts[probe], reach.flight)
            if needs <= reach.memory_bytes:
                low, probe = probe, probe + step
            else:
                high, probe = probe, (probe - step if step else last_fit)
            step = max(1, 2 * step)
        reach.fits[start], reach.fails[start] = low, high
        last_fit, is_full = low, low < target
