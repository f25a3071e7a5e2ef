"""`StepPlan`: into how many micro-batches a step is divided, and how many of them wait at once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.cost.holding import weight_bytes_of
from fxpart.errors import SpecError, nearest_names
from fxpart.graph import IntArray
from fxpart.modes.contiguous_stages import Slots, StageSolver
from fxpart.modes.stage_line import StageLine
from fxpart.modes.stretch_bytes import ONE, Flight, StretchBytes
from fxpart.problem import Problem
from fxpart.schedule.costs import StageCost
from fxpart.schedule.orders import SCHEDULES, Action, ordered_actions
from fxpart.schedule.row_memory import row_peak_bytes

__all__ = ["UNDIVIDED", "StepPlan", "scheduled_bytes"]


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

    def flights(self, devices: int, *, training: bool) -> list[Flight]:
        """Return what each device holds at most, with one stage on each.

        Of a pipeline of some of the devices, in order, no stage holds more than this says.
        """
        if self.schedule == "none":
            return [ONE] * devices
        # A schedule that needs a multiple of the devices is looked at with one.
        whole = -(-self.microbatches // devices) * devices
        rows = ordered_actions(self.schedule, devices, 1, whole, training=training)
        return [Flight(self.microbatches, min(self.microbatches, _most(row))) for row in rows]


UNDIVIDED = StepPlan()
"""One input at a time."""


def _most(row: Sequence[Action]) -> int:
    """Return the most micro-batches that are ahead of their backward at once."""
    return max(itertools.accumulate(1 if action.kind == "F" else -1 for action in row))


def scheduled_bytes(
    problem: Problem, line: StageLine, cuts: IntArray, homes: Sequence[int], plan: StepPlan
) -> IntArray:
    """Return what each device holds at most when stages are run as `plan` says. Shape (D,).

    As `fxpart.schedule.simulate_schedule` counts it. D is the number of devices in use.

    Args:
        problem: what is placed.
        line: its row of units.
        cuts: where each of S stages begins, and where the last ends. Length S + 1.
        homes: device of each stage: 0 to D - 1, again and again. Length S.
        plan: with a schedule.

    Raises:
        SpecError: for a schedule that does not go with so many stages on a device.

    """
    count = max(homes) + 1
    solver = StageSolver(problem.memory, line, Slots((0,), (0,), may_skip=False))
    costs = [
        _cost(solver.stage_bytes(begin, end), home)
        for (begin, end), home in zip(itertools.pairwise(cuts.tolist()), homes, strict=True)
    ]
    training = line.first_backward < problem.graph.n_ops
    rows = ordered_actions(
        plan.schedule, count, len(homes) // count, plan.microbatches, training=training
    )
    device_of = line.of_operators(cuts, homes)
    return np.array(
        [
            weight_bytes_of(problem.memory, np.flatnonzero(device_of == device))
            + row_peak_bytes(costs, row, plan.microbatches)
            for device, row in enumerate(rows)
        ],
        dtype=np.int64,
    )


def _cost(held: StretchBytes, device: int) -> StageCost:
    """Return a stage without times, and without weights: a device may have some for several."""
    results, kept = held.outputs, held.outputs + held.gradients
    return StageCost(
        device=device,
        forward_s=0.0,
        gradient_bytes=held.gradients,
        input_bytes=held.inputs,
        output_bytes=results,
        saved_bytes=held.saved,
        forward_peak_bytes=held.forward_live,
        backward_peak_bytes=max(0, held.backward_live - kept),
        first_backward_peak_bytes=max(0, held.first_backward_live - results),
        update_peak_bytes=max(0, held.update_live - kept),
        update_kept_bytes=max(0, held.end_live - kept) if held.update_live else 0,
    )
