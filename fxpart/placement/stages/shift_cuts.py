"""Local search over cuts into several stages per device, by shifting cuts.

The time of a stage is its load plus the time to receive everything that crosses the cut before it.
Stages form rounds, with one stage on each device. Two quantities bound an interleaved schedule: the
sum of a device's stages, and the sum of the longest stage of each round, which is reached if
devices wait for each other in every round. Both are reduced, starting from even stages: less even
ones may have better bounds, even the smallest largest load, and yet longer steps.

The search is hill climbing, a rule of our own: the first shift that helps is taken, until none
does. The only guarantee is that the largest load of a device does not increase. O(T (S^3 log U +
operators + reads)) for S stages of U units and T tries, at most a thousand: up to S^2 log U shifts
are evaluated, in O(S) each, per try.
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
"""Weight of rounds relative to the busiest device, tuned on simulated steps of captured models."""
_LESS = 1e-9
"""Relative decrease that counts as an improvement."""
_MOST_TRIES = 1000
"""Shifts whose memory is evaluated before the search stops."""
_MOST_REPAIRS = 200
"""Most shifts evaluated in a search for cuts that fit."""
_MOST_SHARE_REPAIRED = 1.25
"""`CutShifter.memory_share` above which no shift is tried. A rule of thumb: on small random graphs,
1.1 refused twice as many plans that fit."""


class _Row(NamedTuple):
    """The row of units and the stages' devices, for compiled loops."""

    homes: IntArray
    """Device of each stage: 0 to D - 1, repeated. Length S."""
    load_before_s: FloatArray
    """Shape (D, U + 1)."""
    receive_s: FloatArray
    """Time for each stage to receive everything that crosses each cut. Shape (S, U + 1)."""


@compiled
def _spread(row: _Row, cuts: IntArray) -> tuple[float, float, float]:
    """Return the largest load of a device, the objective, and the sum of squares of times."""
    devices, stages = row.load_before_s.shape[0], row.homes.shape[0]
    load_s, busy_s = np.zeros(devices), np.zeros(devices)
    rounds_s, longest_s, squares = 0.0, 0.0, 0.0
    for stage in range(stages):
        home = row.homes[stage]
        if home == 0:
            rounds_s, longest_s = rounds_s + longest_s, 0.0
        time_s = row.load_before_s[home, cuts[stage + 1]] - row.load_before_s[home, cuts[stage]]
        load_s[home] += time_s
        time_s += row.receive_s[stage, cuts[stage]]
        busy_s[home] += time_s
        longest_s = max(longest_s, time_s)
        squares += time_s**2
    return load_s.max(), busy_s.max() + _ROUNDS * (rounds_s + longest_s), squares


@compiled
def _next_shift(  # noqa: PLR0917 - compiled code takes no keywords
    row: _Row,
    cuts: IntArray,
    runs: IntArray,
    steps: IntArray,
    begin: int,
    count: int,
    most_s: float,
) -> int:
    """Return the first of `count` shifts from `begin` on (cyclically) that helps, or -1.

    Shift r K + a, with K steps, moves the cuts from `runs[r, 0]` to `runs[r, 1]` by `steps[a]`. No
    device may have a load above `most_s`.
    """
    total, trial = runs.shape[0] * steps.shape[0], cuts.copy()
    _, now_s, squares = _spread(row, cuts)
    for number in range(begin, begin + count):
        shift = number % total
        first, last = runs[shift // steps.shape[0]]
        step = steps[shift % steps.shape[0]]
        if cuts[first] + step <= cuts[first - 1] or cuts[last] + step >= cuts[last + 1]:
            continue
        trial[first : last + 1] += step
        load_s, trial_s, trial_squares = _spread(row, trial)
        trial[first : last + 1] -= step
        is_less = trial_s < now_s * (1 - _LESS)
        if load_s <= most_s and (
            is_less or (trial_s <= now_s and trial_squares < squares * (1 - _LESS))
        ):
            return int(shift)
    return -1


@dataclass(frozen=True, eq=False, slots=True)
class CutShifter:
    """Shifts the cuts of a row of units into stages that go round the devices.

    Cuts are ascending arrays of length S + 1, for S stages, from 0 to U.
    """

    problem: Problem
    line: StageLine
    homes: Sequence[int]
    """Device of each stage: 0 to D - 1, repeated. Length S."""
    step: StepMemory | None = None
    """Memory of the stages over a step; None for one input at a time."""

    def fits(self, cuts: IntArray) -> bool:
        """Return whether the stages fit all devices."""
        return not any(self._excess_bytes(cuts))

    def memory_share(self, cuts: IntArray) -> float:
        """Return the sum of all devices' peaks, as a multiple of their memory."""
        return float(self._peak_bytes(cuts).sum() / self._memory_bytes().sum())

    def made_to_fit(self, cuts: IntArray) -> IntArray | None:
        """Return cuts whose stages all fit, by shifting adjacent cuts together; None if stuck."""
        if self.memory_share(cuts) > _MOST_SHARE_REPAIRED:
            return None
        cuts, excess = cuts.copy(), self._excess_bytes(cuts)
        steps, runs = self._steps(), self._runs().tolist()
        moves = [(first, last, step) for first, last in runs for step in steps]
        tried, number, attempts = 0, 0, 0
        while any(excess) and tried < len(moves) and attempts < _MOST_REPAIRS:
            first, last, step = moves[number % len(moves)]
            number, tried, trial = number + 1, tried + 1, cuts.copy()
            trial[first : last + 1] += step
            if not (trial[first - 1] < trial[first] and trial[last] < trial[last + 1]):
                continue
            attempts += 1
            trial_excess = self._excess_bytes(trial)
            # Squares reward moving excess to another full device if the total is more even.
            if sum(over**2 for over in trial_excess) < sum(over**2 for over in excess):
                cuts, excess, tried = trial, trial_excess, 0
        return None if any(excess) else cuts

    def evened(self, cuts: IntArray) -> IntArray:
        """Return cuts with an objective (`busy_s`) no larger than that of `cuts`, which must fit.

        Single cuts are shifted first, then several adjacent ones together. No device gets a load
        above the largest one at the start.
        """
        row, runs, steps = self._row(), self._runs(), np.array(self._steps(), dtype=np.int64)
        most_s, total = _spread(row, cuts)[0], len(runs) * len(steps)
        begin, remaining_shifts, tries = 0, total, 0
        while remaining_shifts > 0 and tries < _MOST_TRIES:
            shift = _next_shift(row, cuts, runs, steps, begin, remaining_shifts, most_s)
            if shift < 0:
                break
            trial, tries = cuts.copy(), tries + 1
            first, last = runs[shift // len(steps)]
            trial[first : last + 1] += steps[shift % len(steps)]
            if self.fits(trial):
                # Repeating the same shift may help again.
                cuts, begin, remaining_shifts = trial, shift, total
            else:
                remaining_shifts -= (shift - begin) % total + 1
                begin = (shift + 1) % total
        return cuts

    def busy_s(self, cuts: IntArray) -> float:
        """Return the objective of `evened`: the busiest device plus twice the longest rounds."""
        return float(_spread(self._row(), cuts)[1])

    def _runs(self) -> IntArray:
        """Return first and last of the cuts to shift together, single cuts first."""
        first, last = np.triu_indices(len(self.homes) - 1)
        order = np.argsort(last - first, kind="stable")
        return 1 + np.stack([first, last], axis=1)[order]

    def _steps(self) -> list[int]:
        """Return the possible shift distances, largest first."""
        sizes = [1 << power for power in reversed(range(self.line.n_units.bit_length()))]
        return [sign * size for size in sizes for sign in (1, -1)]

    def _row(self) -> _Row:
        before = [self.homes[0], *self.homes[:-1]]
        receive_s = [self.line.receive_s(*pair) for pair in zip(before, self.homes, strict=True)]
        homes = np.array(self.homes, dtype=np.int64)
        return _Row(homes, self.line.load_before_s[: homes.max() + 1].copy(), np.stack(receive_s))

    def _excess_bytes(self, cuts: IntArray) -> list[int]:
        """Return the bytes by which each device exceeds its memory. Length D."""
        return [max(0, int(over)) for over in self._peak_bytes(cuts) - self._memory_bytes()]

    def _memory_bytes(self) -> IntArray:
        """Return the bytes of memory of each device. Shape (D,)."""
        return self.problem.topology.memory_bytes[: max(self.homes) + 1]

    def _peak_bytes(self, cuts: IntArray) -> IntArray:
        """Return the bytes that each device needs. Shape (D,)."""
        if self.step is not None:
            return self.step.peak_bytes(cuts)
        device_of = self.line.of_operators(cuts, self.homes)
        return peak_bytes(self.problem.memory, device_of, max(self.homes) + 1)
