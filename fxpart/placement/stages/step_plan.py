"""`StepPlan`: into how many micro-batches a step is divided, and how many of them wait at once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.holding import weight_bytes_of
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError, nearest_names
from fxpart.placement.stages.contiguous import Slots, StageSolver
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.stretch_bytes import ONE, Flight, StretchBytes
from fxpart.schedule.costs import StageCost
from fxpart.schedule.orders import SCHEDULES, Action, ordered_actions
from fxpart.schedule.simulate import row_peak_bytes

__all__ = ["StepMemory", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as it will be run."""

    schedule: str = "none"
    """One of `fxpart.schedule.SCHEDULES`; ``none`` for a step that is not divided."""
    microbatches: int = 1

    def __post_init__(self) -> None:
        """Refuse a schedule that does not exist, and numbers that mean nothing."""
        if self.schedule != "none" and self.schedule not in SCHEDULES:
            near = nearest_names(self.schedule, ["none", *SCHEDULES])
            raise SpecError(f"mode.schedule={self.schedule} does not exist; {near}")
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise SpecError(
                f"mode.microbatches must be a number from 1 on, got {self.microbatches!r}"
            )
        if self.schedule == "none" and self.microbatches > 1:
            raise SpecError(
                f"mode.microbatches={self.microbatches} needs a schedule; add mode.schedule=1f1b,"
                " or another"
            )

    def flights(self, devices: int, chunks: int = 1, *, training: bool) -> list[Flight]:
        """Return what each stage holds at most, with `chunks` of them on each device.

        Of a pipeline of some of the devices, in order, with one stage on each, no stage holds more
        than this says.

        Raises:
            SpecError: for several stages on a device in a schedule that does not go with them.

        """
        if self.schedule == "none":
            return [ONE] * (devices * chunks)
        # A schedule that needs a multiple of the devices is looked at with one.
        whole = -(-self.microbatches // devices) * devices if chunks == 1 else self.microbatches
        rows = ordered_actions(self.schedule, devices, chunks, whole, training=training)
        return [
            Flight(self.microbatches, min(self.microbatches, _most(rows[stage % devices], stage)))
            for stage in range(devices * chunks)
        ]


def _most(row: Sequence[Action], stage: int) -> int:
    """Return the most micro-batches that are ahead of their backward at once in a stage."""
    steps = (1 if action.kind == "F" else -1 for action in row if action.stage == stage)
    return max(itertools.accumulate(steps))


class StepMemory:
    """What devices hold when stages are run by a schedule, for one cut after the other."""

    def __init__(
        self, problem: Problem, line: StageLine, homes: Sequence[int], plan: StepPlan
    ) -> None:
        """Prepare for stages of `line`, a row of U units.

        Args:
            problem: what is placed.
            line: its row of units.
            homes: device of each of S stages: 0 to D - 1, again and again.
            plan: with a schedule.

        Raises:
            SpecError: for a schedule that does not go with so many stages on a device.

        """
        self._problem, self._line, self._homes = problem, line, homes
        self._microbatches, count = plan.microbatches, max(homes) + 1
        self._rows = ordered_actions(
            plan.schedule,
            count,
            len(homes) // count,
            plan.microbatches,
            training=line.first_backward < problem.graph.n_ops,
        )
        self._solver = StageSolver(problem.memory, line, Slots((0,), (0,), may_skip=False))
        self._held: dict[tuple[int, int], StretchBytes] = {}
        self._weights: dict[tuple[tuple[int, int], ...], int] = {}

    def peak_bytes(self, cuts: IntArray) -> IntArray:
        """Return the most that each device holds, as `simulate_schedule` counts it. Shape (D,).

        `cuts` say where each stage begins, and where the last one ends. Length S + 1.
        """
        stretches = list(itertools.pairwise(cuts.tolist()))
        costs = [_cost(self._of(s), home) for s, home in zip(stretches, self._homes, strict=True)]
        count = len(self._rows)
        return np.array(
            [
                self._weight_bytes(tuple(stretches[device::count]))
                + row_peak_bytes(costs, row, self._microbatches)
                for device, row in enumerate(self._rows)
            ],
            dtype=np.int64,
        )

    def _of(self, stretch: tuple[int, int]) -> StretchBytes:
        if stretch not in self._held:
            self._held[stretch] = self._solver.stage_bytes(*stretch)
        return self._held[stretch]

    def _weight_bytes(self, stretches: tuple[tuple[int, int], ...]) -> int:
        """Return the bytes of the weights of all stages of a device, each once."""
        if stretches not in self._weights:
            unit_of = self._line.unit_of
            in_stretch = [(unit_of >= begin) & (unit_of < end) for begin, end in stretches]
            operators = np.flatnonzero(np.logical_or.reduce(in_stretch))
            self._weights[stretches] = weight_bytes_of(self._problem.memory, operators)
        return self._weights[stretches]


def _cost(stretch: StretchBytes, device: int) -> StageCost:
    """Return a stage without times, and without weights: a device may have some for several."""
    results, kept = stretch.outputs, stretch.outputs + stretch.gradients
    return StageCost(
        device=device,
        forward_s=0.0,
        gradient_bytes=stretch.gradients,
        input_bytes=stretch.inputs,
        output_bytes=results,
        saved_bytes=stretch.saved,
        forward_peak_bytes=stretch.forward_live,
        backward_peak_bytes=max(0, stretch.backward_live - kept),
        first_backward_peak_bytes=max(0, stretch.first_backward_live - results),
        update_peak_bytes=max(0, stretch.update_live - kept),
        update_kept_bytes=stretch.update_kept,
    )
