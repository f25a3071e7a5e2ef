"""Cuts into stages of which each device has several, shifted while that helps: a local search.

The time of a stage is its load and the time to receive what crosses the cut before it. Stages are
in rounds, one on each device. Two things bound an interleaved schedule: the sum of a device's
stages, below which it cannot stay, and the longest stages of all rounds, which it takes where
devices wait for each other in each round. Both are to fall, near a start with even stages: less
even ones may have better bounds, even the least largest load of a device, and yet longer steps.

The search is hill climbing, a rule of our own: the first shift that helps is taken, until none
does. Nothing is promised but that the largest load of a device is no larger than at the start.
O(T (S^3 log U + operators + reads)) for S stages of U units and T tries, of which there are at most
a thousand: S^2 log U shifts are weighed, in O(S) each, until one is tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.problem import Problem
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.step_plan import StepMemory
from fxpart.support.compiled import compiled

__all__ = ["CutShifter"]

_ROUNDS = 2.0
"""Weight of the rounds beside the busiest device; chosen by simulated steps of captured models."""
_LESS = 1e-9
"""The share by which a number must fall to count as less."""
_MOST_TRIES = 1000
"""Shifts whose memory is evaluated before the search stops."""
_MOST_REPAIRS = 200
"""The same for a search for any cuts that fit, before it gives up."""


class _Row(NamedTuple):
    """What compiled loops know of the row of units and of the stages' devices."""

    homes: IntArray
    """Device of each stage: 0 to D - 1, again and again. Length S."""
    load_before_s: FloatArray
    """Shape (D, U + 1)."""
    receive_s: FloatArray
    """How long each stage takes to receive what crosses a cut. Shape (S, U + 1)."""


@compiled
def _spread(row: _Row, cuts: IntArray) -> tuple[float, float, float]:
    """Return the largest load of a device, what is to fall, and the sum of squares of times."""
    devices, stages = row.load_before_s.shape[0], row.homes.shape[0]
    load_s, busy_s = np.zeros(devices), np.zeros(devices)
    rounds_s, longest_s, squares = 0.0, 0.0, 0.0
    for stage in range(stages):
        home = row.homes[stage]
        if home == 0:
            rounds_s, longest_s = rounds_s + longest_s, 0.0
        takes_s = row.load_before_s[home, cuts[stage + 1]] - row.load_before_s[home, cuts[stage]]
        load_s[home] += takes_s
        takes_s += row.receive_s[stage, cuts[stage]]
        busy_s[home] += takes_s
        longest_s = max(longest_s, takes_s)
        squares += takes_s**2
    return load_s.max(), busy_s.max() + _ROUNDS * (rounds_s + longest_s), squares


@compiled
def _next_shift(  # noqa: PLR0917 - compiled code takes no keywords
    row: _Row, cuts: IntArray, runs: IntArray, steps: IntArray, at: int, left: int, most_s: float
) -> int:
    """Return the number of the first shift that helps of `left`, from `at` on and around; or -1.

    Number r K + a, of K steps, is that of the cuts from `runs[r, 0]` to `runs[r, 1]` by `steps[a]`.
    No device may have a load of more than `most_s`.
    """
    total, trial = runs.shape[0] * steps.shape[0], cuts.copy()
    _, now_s, squares = _spread(row, cuts)
    for number in range(at, at + left):
        shift = number % total
        first, last = runs[shift // steps.shape[0]]
        step = steps[shift % steps.shape[0]]
        if cuts[first] + step <= cuts[first - 1] or cuts[last] + step >= cuts[last + 1]:
            continue
        trial[first : last + 1] += step
        load_s, then_s, then_squares = _spread(row, trial)
        trial[first : last + 1] -= step
        less = then_s < now_s * (1 - _LESS)
        if load_s <= most_s and (
            less or (then_s <= now_s and then_squares < squares * (1 - _LESS))
        ):
            return int(shift)
    return -1


@dataclass(frozen=True, eq=False, slots=True)
class CutShifter:
    """Shifts cuts of one row of units into stages that go over the devices in turn.

    Cuts are arrays of length S + 1, for S stages, that rise from 0 to U.
    """

    problem: Problem
    line: StageLine
    homes: Sequence[int]
    """Device of each stage: 0 to D - 1, again and again. Length S."""
    step: StepMemory | None = None
    """What the stages hold in a step; None for one input at a time."""

    def fits(self, cuts: IntArray) -> bool:
        """Return whether all devices hold their stages."""
        return not any(self._excess_bytes(cuts))

    def made_to_fit(self, cuts: IntArray) -> IntArray | None:
        """Return cuts whose stages all fit, by shifts of one at a time; None if it gets stuck."""
        excess, cuts = self._excess_bytes(cuts), cuts.copy()
        moves = [(cut, step) for cut in range(1, len(self.homes)) for step in self._steps()]
        tried, at = 0, 0
        while any(excess) and tried < len(moves) and at < _MOST_REPAIRS:
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

    def evened(self, cuts: IntArray) -> IntArray:
        """Return cuts with a sum of busiest device and rounds no larger than of `cuts`, which fit.

        One cut is shifted at a time, then several next to each other by as many units. No device
        gets a load above the largest there is at the start.
        """
        row, runs, steps = self._row(), self._runs(), np.array(self._steps(), dtype=np.int64)
        most_s, total = _spread(row, cuts)[0], len(runs) * len(steps)
        at, left, tries = 0, total, 0
        while left > 0 and tries < _MOST_TRIES:
            shift = _next_shift(row, cuts, runs, steps, at, left, most_s)
            if shift < 0:
                break
            trial, tries = cuts.copy(), tries + 1
            first, last = runs[shift // len(steps)]
            trial[first : last + 1] += steps[shift % len(steps)]
            if self.fits(trial):
                # The same again may help again.
                cuts, at, left = trial, shift, total
            else:
                left -= (shift - at) % total + 1
                at = (shift + 1) % total
        return cuts

    def busy_s(self, cuts: IntArray) -> float:
        """Return what `evened` makes small: the busiest device and twice the longest rounds."""
        return float(_spread(self._row(), cuts)[1])

    def _runs(self) -> IntArray:
        """Return first and last of the cuts that are shifted together, single ones first."""
        first, last = np.triu_indices(len(self.homes) - 1)
        order = np.argsort(last - first, kind="stable")
        return 1 + np.stack([first, last], axis=1)[order]

    def _steps(self) -> list[int]:
        """Return by how much cuts may be shifted at once, far ones first."""
        sizes = [1 << power for power in reversed(range(self.line.n_units.bit_length()))]
        return [sign * size for size in sizes for sign in (1, -1)]

    def _row(self) -> _Row:
        before = [self.homes[0], *self.homes[:-1]]
        receive_s = [self.line.receive_s(*pair) for pair in zip(before, self.homes, strict=True)]
        homes = np.array(self.homes, dtype=np.int64)
        return _Row(homes, self.line.load_before_s[: homes.max() + 1].copy(), np.stack(receive_s))

    def _excess_bytes(self, cuts: IntArray) -> list[int]:
        """Return by how many bytes each device is overfull. Length D."""
        sizes = self.problem.topology.memory_bytes
        if self.step is not None:
            needed = self.step.peak_bytes(cuts)
        else:
            device_of = self.line.of_operators(cuts, self.homes)
            needed = peak_bytes(self.problem.memory, device_of, max(self.homes) + 1)
        return [max(0, int(over)) for over in needed - sizes[: len(needed)]]
