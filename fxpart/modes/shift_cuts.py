"""Cuts into stages of which each device has several, shifted while that helps: a local search.

The largest load of a device is then no largest load of a stage, which
`fxpart.modes.contiguous_stages` finds exactly. Here nothing is promised, but never to end worse
than at the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.compiled import compiled
from fxpart.cost.evaluate import peak_bytes
from fxpart.graph import FloatArray, IntArray
from fxpart.modes.stage_line import StageLine
from fxpart.problem import Problem

__all__ = ["CutShifter"]

_LESS = 1e-9
"""The share by which a number must fall to count as less."""
_MOST_TRIES = 1000
"""Shifts of which the memory is asked for, before the search is content with what it has."""


class _Row(NamedTuple):
    """What compiled loops know of the row of units and of the stages' devices."""

    homes: IntArray
    """Device of each stage. Length S."""
    load_before_s: FloatArray
    """Shape (D, U + 1)."""
    receive_s: FloatArray
    """How long each stage takes to receive what crosses a cut. Shape (S, U + 1)."""


class _Times(NamedTuple):
    """Times of each device, in seconds. Length D each."""

    load_s: FloatArray
    busy_s: FloatArray
    """Loads, and the time to receive what crosses the cut before each stage."""


@compiled
def _add(times: _Times, device: int, load_s: float, receive_s: float) -> float:
    """Add to the times of a device; return what that adds to the sum of squares of `busy_s`."""
    before_s = times.busy_s[device]
    times.load_s[device] += load_s
    times.busy_s[device] += load_s + receive_s
    return float(times.busy_s[device] ** 2 - before_s**2)


@compiled
def _shift(row: _Row, times: _Times, cut: int, begin: int, end: int) -> float:
    """Move the cut before stage `cut`; return what that adds to the sum of squares."""
    before, behind = row.homes[cut - 1], row.homes[cut]
    more_s = row.load_before_s[before, end] - row.load_before_s[before, begin]
    less_s = row.load_before_s[behind, end] - row.load_before_s[behind, begin]
    receive_s = row.receive_s[cut, end] - row.receive_s[cut, begin]
    return _add(times, before, more_s, 0.0) + _add(times, behind, -less_s, receive_s)


@compiled
def _times(row: _Row, cuts: IntArray) -> _Times:
    """Return the times of all devices for cuts that begin with 0 and end with U."""
    devices = row.load_before_s.shape[0]
    times = _Times(np.zeros(devices), np.zeros(devices))
    for stage in range(row.homes.shape[0]):
        home = row.homes[stage]
        load_s = row.load_before_s[home, cuts[stage + 1]] - row.load_before_s[home, cuts[stage]]
        _add(times, home, load_s, row.receive_s[stage, cuts[stage]])
    return times


@compiled
def _in_order(cuts: IntArray, cut: int) -> bool:
    return bool(cuts[cut - 1] < cuts[cut] < cuts[cut + 1])


@compiled
def _next_shift(  # noqa: PLR0917 - compiled code takes no keywords
    row: _Row, cuts: IntArray, shifts: IntArray, steps: IntArray, at: int, left: int
) -> int:
    """Return the number of the first shift that helps of `left`, from `at` on and around; or -1.

    It helps if the largest load of a device falls, or stays while the sum of the squares of the
    `busy_s` of devices falls. Number (s K + a) K + b, of K steps, is the shift of the two cuts
    `shifts[s]` by `steps[a]` and `steps[b]`; where both are the same cut, of this cut by
    `steps[a]`, if a is b.
    """
    count, trial, now = steps.shape[0], cuts.copy(), _times(row, cuts)
    largest_s, squares = now.load_s.max(), (now.busy_s**2).sum()
    then = _Times(now.load_s.copy(), now.busy_s.copy())
    total = shifts.shape[0] * count * count
    for number in range(at, at + left):
        found = number % total
        one, two = shifts[found // count // count]
        a, b = found // count % count, found % count
        if one == two and a != b:
            continue
        trial[one], trial[two] = cuts[one] + steps[a], cuts[two] + steps[b]
        if _in_order(trial, one) and _in_order(trial, two):
            more = _shift(row, then, one, cuts[one], trial[one])
            if one != two:
                more += _shift(row, then, two, cuts[two], trial[two])
            most_s = then.load_s.max()
            if most_s <= largest_s * (1 - _LESS) or (
                most_s <= largest_s and more < -_LESS * squares
            ):
                return int(found)
            for stage in (one - 1, one, two - 1, two):
                home = row.homes[stage]
                then.load_s[home], then.busy_s[home] = now.load_s[home], now.busy_s[home]
        trial[one], trial[two] = cuts[one], cuts[two]
    return -1


@dataclass(frozen=True, eq=False, slots=True)
class CutShifter:
    """Shifts cuts of one row of units whose stages are on given devices.

    Cuts are arrays of length S + 1, for S stages, that rise from 0 to U.
    """

    problem: Problem
    line: StageLine
    homes: Sequence[int]
    """Device of each stage. Length S."""

    def fits(self, cuts: IntArray) -> bool:
        """Return whether all devices hold their stages."""
        return not any(self._excess_bytes(cuts))

    def made_to_fit(self, cuts: IntArray) -> IntArray | None:
        """Return cuts whose stages all fit, by shifts of one at a time; None if it gets stuck."""
        excess, cuts = self._excess_bytes(cuts), cuts.copy()
        moves = [(cut, step) for cut in range(1, len(self.homes)) for step in self._steps()]
        tried, at = 0, 0
        while any(excess) and tried < len(moves) and at < _MOST_TRIES:
            cut, step = moves[at % len(moves)]
            at, tried, trial = at + 1, tried + 1, cuts.copy()
            trial[cut] += step
            if not trial[cut - 1] < trial[cut] < trial[cut + 1]:
                continue
            then = self._excess_bytes(trial)
            # Squares: what is passed on to another full device counts, if less of it is too much.
            if sum(over**2 for over in then) < sum(over**2 for over in excess):
                cuts, excess, tried = trial, then, 0
        return None if any(excess) else cuts

    def least_load(self, cuts: IntArray) -> IntArray:
        """Return cuts whose largest load of a device is no larger than that of `cuts`, which fit.

        One cut is shifted at a time while that helps, then two at once.
        """
        row, shifts, steps = self._row(), self._shifts(), np.array(self._steps(), dtype=np.int64)
        total = len(shifts) * len(steps) ** 2
        at, left, tries = 0, total, 0
        while left > 0 and tries < _MOST_TRIES:
            found = _next_shift(row, cuts, shifts, steps, at, left)
            if found < 0:
                break
            pair, step = divmod(found, len(steps) ** 2)
            trial, tries = cuts.copy(), tries + 1
            trial[shifts[pair]] += steps[list(divmod(step, len(steps)))]
            if not self.fits(trial):
                left -= (found - at) % total + 1
                at = (found + 1) % total
                continue
            # The same again may help again; after two at once, first one at a time.
            cuts, left, at = trial, total, found if pair < len(row.homes) - 1 else 0
        return cuts

    def _shifts(self) -> IntArray:
        """Return the cuts that are shifted at once, each with itself first."""
        each = np.arange(len(self.homes) - 1)
        one, two = np.triu_indices(len(each), 1)
        return 1 + np.stack([np.concatenate([each, one]), np.concatenate([each, two])], axis=1)

    def _steps(self) -> list[int]:
        """Return by how much a cut may be shifted at once, far ones first."""
        sizes = [1 << power for power in reversed(range(self.line.n_units.bit_length()))]
        return [sign * size for size in sizes for sign in (1, -1)]

    def _row(self) -> _Row:
        before = [self.homes[0], *self.homes[:-1]]
        receive_s = [self.line.receive_s(*pair) for pair in zip(before, self.homes, strict=True)]
        homes = np.array(self.homes, dtype=np.int64)
        return _Row(homes, self.line.load_before_s[: homes.max() + 1].copy(), np.stack(receive_s))

    def _excess_bytes(self, cuts: IntArray) -> list[int]:
        """Return by how many bytes each device is overfull. Length D."""
        homes = np.repeat(np.array(self.homes, dtype=np.int64), np.diff(cuts))
        device_of, sizes = homes[self.line.unit_of], self.problem.topology.memory_bytes
        needed = peak_bytes(self.problem.memory, device_of, int(homes.max()) + 1)
        return [max(0, int(over)) for over in needed - sizes[: len(needed)]]
