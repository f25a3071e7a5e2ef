"""`StepPlan`: the microbatches of a step, and how many are in flight."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.cost.problem import Problem
from fxpart.errors import SpecError, nearest_names
from fxpart.placement.stages.contiguous import Slots, StageSolver
from fxpart.placement.stages.line import StageLine
from fxpart.placement.stages.stretch_bytes import ONE, Flight
from fxpart.schedule.orders import SCHEDULES, Action, ordered_actions
from fxpart.support.compiled import compiled

__all__ = ["StepMemory", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The schedule and microbatches of a step."""

    schedule: str = "none"
    """One of `fxpart.schedule.SCHEDULES`; ``none`` for a step without microbatches."""
    microbatches: int = 1

    def __post_init__(self) -> None:
        """Check the schedule and the number of microbatches."""
        if self.schedule != "none" and self.schedule not in SCHEDULES:
            near = nearest_names(self.schedule, ["none", *SCHEDULES])
            raise SpecError(f"mode.schedule={self.schedule} does not exist; {near}")
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise SpecError(
                f"mode.microbatches must be a whole number, 1 or more, got {self.microbatches!r}"
            )
        if self.schedule == "none" and self.microbatches > 1:
            raise SpecError(
                f"mode.microbatches={self.microbatches} needs a schedule; add mode.schedule=1f1b,"
                " or another"
            )

    def flights(self, devices: int, chunks: int = 1, *, training: bool) -> list[Flight]:
        """Return the most microbatches in flight per stage, with `chunks` stages per device.

        The result is also an upper bound for pipelines over a subset of the devices, in order, with
        one stage on each.

        Raises:
            SpecError: if the schedule does not support several stages on a device.

        """
        if self.schedule == "none":
            return [ONE] * (devices * chunks)
        # Some schedules need a multiple of the devices.
        whole = -(-self.microbatches // devices) * devices if chunks == 1 else self.microbatches
        rows = ordered_actions(self.schedule, devices, chunks, whole, training=training)
        return [
            Flight(self.microbatches, min(self.microbatches, _most(rows[stage % devices], stage)))
            for stage in range(devices * chunks)
        ]


def _most(row: Sequence[Action], stage: int) -> int:
    """Return the most microbatches in flight at once in a stage."""
    steps = (1 if action.kind == "F" else -1 for action in row if action.stage == stage)
    return max(itertools.accumulate(steps))


class StepMemory:
    """Memory of devices when stages are run by a schedule, evaluated for many cuts."""

    def __init__(
        self, problem: Problem, line: StageLine, homes: Sequence[int], plan: StepPlan
    ) -> None:
        """Prepare for stages of `line`, a row of U units.

        Args:
            problem: the problem.
            line: its row of units.
            homes: device of each of S stages: 0 to D - 1, repeated.
            plan: a plan with a schedule.

        Raises:
            SpecError: if the schedule does not support this many stages on a device.

        """
        self._problem = problem
        self._microbatches, count = plan.microbatches, max(homes) + 1
        rows = ordered_actions(
            plan.schedule,
            count,
            len(homes) // count,
            plan.microbatches,
            training=line.first_backward < problem.graph.n_ops,
        )
        actions = [(action.kind == "F", action.stage) for row in rows for action in row]
        self._actions = np.array(actions, dtype=np.int64).reshape(-1, 2)
        self._starts = np.cumsum([0, *(len(row) for row in rows)])
        self._solver = StageSolver(line, Slots((0,), (0,), may_skip=False))
        self._held: dict[tuple[int, int], tuple[int, ...]] = {}
        memory = problem.memory
        # Distinct pairs of unit and weight.
        of_use = line.unit_of[np.repeat(np.arange(problem.graph.n_ops), np.diff(memory.use_start))]
        pairs = np.unique(np.stack([of_use, memory.uses]), axis=1)
        self._use_start = np.searchsorted(pairs[0], np.arange(line.n_units + 1))
        self._uses = np.ascontiguousarray(pairs[1])

    def peak_bytes(self, cuts: IntArray) -> IntArray:
        """Return the peak of each device, as counted by `simulate_schedule`. Shape (D,).

        `cuts` are the begins of the stages, then the end of the last. Length S + 1.
        """
        stages = [self._of(stretch) for stretch in itertools.pairwise(cuts.tolist())]
        stage_bytes = _StageBytes(*np.array(stages, dtype=np.int64).T.copy())
        weights = _device_weights(
            self._use_start,
            self._uses,
            self._problem.memory.weight_bytes,
            np.asarray(cuts, dtype=np.int64),
            len(self._starts) - 1,
        )
        return _peak_bytes(self._actions, self._starts, stage_bytes, weights, self._microbatches)

    def _of(self, stretch: tuple[int, int]) -> tuple[int, ...]:
        if stretch not in self._held:
            self._held[stretch] = tuple(self._solver.stage_bytes(*stretch))
        return self._held[stretch]


class _StageBytes(NamedTuple):
    """The `StretchBytes` of all stages, field by field. Each of length S."""

    weights: IntArray
    inputs: IntArray
    outputs: IntArray
    gradients: IntArray
    saved: IntArray
    forward_live: IntArray
    first_backward_live: IntArray
    backward_live: IntArray
    update_live: IntArray
    update_kept: IntArray


@compiled
def _device_weights(
    use_start: IntArray, uses: IntArray, weight_bytes: IntArray, cuts: IntArray, devices: int
) -> IntArray:
    """Return the bytes of the distinct weights of all stages of each device. Shape (D,)."""
    total = np.zeros(devices, dtype=np.int64)
    stamp = np.full(weight_bytes.shape[0], -1, dtype=np.int64)
    for device in range(devices):
        for stage in range(device, cuts.shape[0] - 1, devices):
            for i in range(use_start[cuts[stage]], use_start[cuts[stage + 1]]):
                if stamp[uses[i]] != device:
                    stamp[uses[i]] = device
                    total[device] += weight_bytes[uses[i]]
    return total


@compiled
def _peak_bytes(
    actions: IntArray,
    starts: IntArray,
    stage_bytes: _StageBytes,
    weights: IntArray,
    microbatches: int,
) -> IntArray:
    """Return the peak of each device as of `simulate_schedule`, without sharding. Shape (D,).

    Args:
        actions: whether each is a forward, and its stage, device by device.
        starts: where the actions of each device begin. Length D + 1.
        stage_bytes: bytes of each of S stages.
        weights: bytes of each device's weights.
        microbatches: number of microbatches per step.

    """
    devices, stages = starts.shape[0] - 1, stage_bytes.inputs.shape[0]
    peaks = np.zeros(devices, dtype=np.int64)
    has_gradient = np.zeros(stages, dtype=np.bool_)
    for device in range(devices):
        live_bytes = weights[device]
        for stage in range(device, stages, devices):
            live_bytes += microbatches * stage_bytes.inputs[stage]
        peak = live_bytes
        for i in range(starts[device], starts[device + 1]):
            stage = actions[i, 1]
            outputs, gradients = stage_bytes.outputs[stage], stage_bytes.gradients[stage]
            if actions[i, 0] == 1:
                peak = max(peak, live_bytes + stage_bytes.forward_live[stage])
                live_bytes += stage_bytes.saved[stage] + outputs
                continue
            live_bytes -= stage_bytes.saved[stage]
            if has_gradient[stage]:
                peak = max(
                    peak,
                    live_bytes + max(0, stage_bytes.backward_live[stage] - outputs - gradients),
                )
            else:
                peak = max(
                    peak, live_bytes + max(0, stage_bytes.first_backward_live[stage] - outputs)
                )
                live_bytes += gradients
                has_gradient[stage] = True
        for stage in range(device, stages, devices):
            result_bytes = stage_bytes.outputs[stage] + stage_bytes.gradients[stage]
            peak = max(peak, live_bytes + max(0, stage_bytes.update_live[stage] - result_bytes))
            live_bytes += stage_bytes.update_kept[stage]
        peaks[device] = peak
    return peaks
