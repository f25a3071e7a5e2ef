"""How far a pipeline stage may reach until its device is full; asked only where it matters."""

from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.tables import MemoryTables
from fxpart.graph import IntArray
from fxpart.modes.stage_line import StageLine
from fxpart.modes.stretch_bytes import Flight, StretchRoom, UnitTables, stretch_needs

__all__ = ["Reach", "reach_of", "settle"]


class Reach(NamedTuple):
    """What is known of a device of one size: stretches from a unit that fit it, and that do not."""

    fits: IntArray
    """Furthest cut at which a stage from each unit may end, as far as is known. Length U + 1."""
    fails: IntArray
    """Nearest cut at which it may not, as far as is known; U + 1 for none. Length U + 1."""
    memory_bytes: int
    flight: Flight


def reach_of(m: MemoryTables, line: StageLine, memory_bytes: int, flight: Flight) -> Reach:
    """Return what is known of a device by the weights alone. O(U + uses)."""
    of_use = line.unit_of[np.repeat(np.arange(len(line.unit_of)), np.diff(m.use_start))]
    order = np.argsort(of_use, kind="stable")
    use_start = np.searchsorted(of_use[order], np.arange(line.n_units + 1))
    fails = _weights_fail(use_start, m.uses[order], m.weight_bytes, memory_bytes)
    return Reach(np.arange(line.n_units + 1), fails, memory_bytes, flight)


@compiled
def _weights_fail(
    use_start: IntArray, uses: IntArray, weight_bytes: IntArray, memory_bytes: int
) -> IntArray:
    """Return the nearest cut to which the weights from each unit on are too much; U + 1 for none.

    Args:
        use_start: CSR starts into `uses` by unit. Length U + 1.
        uses: weights that each unit uses.
        weight_bytes: bytes of each weight.
        memory_bytes: what there is.

    """
    count = use_start.shape[0] - 1
    fails = np.full(count + 1, count + 1, dtype=np.int64)
    held = np.zeros(weight_bytes.shape[0], dtype=np.int64)
    end, used = 0, 0
    for start in range(count):
        while end < count and used <= memory_bytes:
            for i in range(use_start[end], use_start[end + 1]):
                used += weight_bytes[uses[i]] if held[uses[i]] == 0 else 0
                held[uses[i]] += 1
            end += 1
        if used <= memory_bytes:
            break
        fails[start] = end
        for i in range(use_start[start], use_start[start + 1]):
            held[uses[i]] -= 1
            used -= weight_bytes[uses[i]] if held[uses[i]] == 0 else 0
    return fails


@compiled
def settle(  # noqa: PLR0917 - compiled code takes no keywords
    m: MemoryTables,
    units: UnitTables,
    room: StretchRoom,
    starts: IntArray,
    wanted: IntArray,
    reach: Reach,
) -> None:
    """Learn for each unit of `starts` whether a stage may reach to `wanted`, else how far it may.

    More units never need less memory when there is no backward: what a stretch reads from before it
    stays received however long it is. So the furthest end is found by doubling and halving, from
    that of the start before. It is not monotone in the start: a view may be larger than its base.
    """
    near = 0
    for start in starts:
        low, high = reach.fits[start], reach.fails[start]
        probe, step = min(wanted[start], high - 1), 0
        if wanted[start] <= low or high - low <= 1:
            near = low
            continue
        while high - low > 1 and low < wanted[start]:
            if not low < probe < high:
                probe = (low + high) // 2
            needs = stretch_needs(m, units, room, start, probe, reach.flight)
            if needs <= reach.memory_bytes:
                low, probe = probe, probe + step
            else:
                high, probe = probe, (probe - step if step else near)
            step = max(1, 2 * step)
        reach.fits[start], reach.fails[start] = low, high
        near = low
