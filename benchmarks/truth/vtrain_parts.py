"""Parts of a step of `vtrain`, from which its time follows for given coefficients.

A step is planned with one microbatch, and its parts do not depend on their number. A stage's
forward or backward takes its device's kernels or the host's launches, whichever is longer.

The coefficients stand for what Megatron-LM of 2022 does and the plan does not:

- Biases, GELU, dropout and residuals were fused, queries, keys and values were one product, and
  there was no rotary embedding. So kernels besides products take a share of their planned time.
- The loss over a split vocabulary was many kernels in float32 (mpu/cross_entropy.py), not one.
- Softmax was fused only if a device's heads times the batch are a multiple of 4
  (`FusedScaleMaskSoftmax`).
- Sending to the next stage synchronized with the device (p2p_communication.py).
"""

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks.truth.megatron_steps import planned_step, schedule_of
from benchmarks.truth.vtrain import Plan
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.collective_times import collective_kinds
from fxpart.cost.tables import launch_s
from fxpart.schedule import PipelineCosts, ScheduleResult, StageCost, StageLink, simulate_schedule
from fxpart.schedule.from_assignment import stages_of
from runner.experiment.result import Result

__all__ = ["Coefficients", "Parts", "parts_of"]

BoolArray = npt.NDArray[np.bool_]
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
_LOSSES = "fxpart.vocab_losses"
_HEADS_AT_ONCE = 4
"""Heads of a device times the batch must be a multiple of this for a fused softmax."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Numbers that describe the measured program and its host."""

    launch_s: float
    """Time of the host to launch an operator."""
    elementwise: float
    """Time of kernels besides products, collectives and the loss, relative to the planned one."""
    loss: float
    """Time of the loss and its gradient relative to one pass over the logits for each."""
    softmax_launches: float
    """More launches of a softmax that is not fused; twice as many in a backward that recomputes."""
    transfer_s: float
    """Fixed time of a transfer to another stage."""


@dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """Work of each stage; the columns are the forward and backward of one microbatch."""

    products_s: FloatArray
    """Matrix products and collectives. Shape (stages, 2)."""
    elementwise_s: FloatArray
    """Other kernels. Shape (stages, 2)."""
    loss_s: FloatArray
    """Shape (stages, 2)."""
    launches: FloatArray
    """Shape (stages, 2)."""
    softmaxes: FloatArray
    """Softmaxes in each forward that are not fused. Shape (stages,)."""
    transfers_s: FloatArray
    """The transfer after a forward, and after a backward. Shape (2,)."""
    end_s: FloatArray
    """All-reduces and updates, once per step. Shape (stages,)."""

    def step_s(self, coefficients: Coefficients, microbatches: int) -> float:
        """Return the time of a step."""
        launches = self.launches.copy()
        launches += coefficients.softmax_launches * np.outer(self.softmaxes, [1, 2])
        device_s = self.products_s + coefficients.elementwise * self.elementwise_s
        device_s += coefficients.loss * self.loss_s
        times_s = np.maximum(device_s, coefficients.launch_s * launches).tolist()
        stages = [
            StageCost(stage, forward_s, backward_s, update_s=end_s)
            for stage, ((forward_s, backward_s), end_s) in enumerate(
                zip(times_s, self.end_s.tolist(), strict=True)
            )
        ]
        ahead_s, back_s = (self.transfers_s + coefficients.transfer_s).tolist()
        links = [
            link
            for stage in range(len(stages) - 1)
            for link in (
                StageLink("F", stage, stage + 1, 0, ahead_s),
                StageLink("B", stage + 1, stage, 0, back_s),
            )
        ]
        costs = PipelineCosts(tuple(stages), tuple(links), training=True)
        return simulate_schedule("1f1b", costs, microbatches).step_s


def parts_of(plan: Plan) -> Parts:
    """Return the parts of a plan, extrapolated from two steps with few layers.

    Raises:
        FxpartError: if a step cannot be planned.

    """
    least = 2 if plan.pipeline == 1 else 1  # a single layer is not recomputed
    few, more = (_planned(plan.overrides(plan.pipeline * n, 1)) for n in (least, least + 1))
    further = plan.layers / plan.pipeline - least
    parts = {}
    for field in fields(Parts):
        part = getattr(few, field.name)
        parts[field.name] = part + further * (getattr(more, field.name) - part)
    if plan.micro_batch * plan.heads // plan.tensor % _HEADS_AT_ONCE == 0:
        parts["softmaxes"] = np.zeros_like(parts["softmaxes"])
    return Parts(**parts)


@lru_cache(maxsize=1024)
def _planned(overrides: tuple[str, ...]) -> Parts:
    return _parts(planned_step(overrides))


def _parts(result: Result) -> Parts:
    problem = result.problem
    graph, costs = problem.graph, problem.costs
    stage_of, devices = stages_of(graph, result.assignment)
    times_s = costs.op_time_s[np.arange(graph.n_ops), np.array(devices)[stage_of]]
    is_loss, is_elementwise = _kinds(graph)
    launched = launch_s(graph, problem.topology) > 0

    def total(amounts: FloatArray) -> FloatArray:
        return _by_stage(graph, stage_of, amounts)

    is_softmax = np.array([target.startswith("fxpart.causal_softmax.") for target in graph.targets])
    return Parts(
        products_s=total(times_s * ~(is_loss | is_elementwise)),
        elementwise_s=total(times_s * is_elementwise),
        loss_s=total(times_s * is_loss),
        launches=total(launched.astype(np.float64)),
        softmaxes=total(is_softmax.astype(np.float64))[:, 0],
        transfers_s=_transfers_s(schedule_of(result)),
        end_s=_end_s(schedule_of(result), devices),
    )


def _kinds(graph: OpGraph) -> tuple[BoolArray, BoolArray]:
    """Return which operators are of the loss, and which are neither that nor a product."""
    collectives = collective_kinds(graph)
    is_loss = np.array([target.startswith(_LOSSES) for target in graph.targets])
    is_other = np.array(
        [
            op not in collectives and not target.startswith(_PRODUCTS)
            for op, target in enumerate(graph.targets)
        ]
    )
    return is_loss, is_other & ~is_loss


def _by_stage(graph: OpGraph, stage_of: IntArray, amounts: FloatArray) -> FloatArray:
    """Return the sums over each stage's forward and backward, without updates."""
    is_backward = np.arange(graph.n_ops) >= graph.first_backward
    sums = np.zeros((int(stage_of.max()) + 1, 2))
    np.add.at(sums, (stage_of, is_backward.astype(np.int64)), amounts * ~graph.is_update)
    return sums


def _transfers_s(schedule: ScheduleResult) -> FloatArray:
    """Return the longest transfer between neighbours after a forward, and after a backward."""
    seconds = {"F": 0.0, "B": 0.0}
    for move in schedule.transfers:
        if abs(move.source - move.target) == 1:
            seconds[move.kind] = max(seconds[move.kind], move.finish_s - move.start_s)
    return np.array([seconds["F"], seconds["B"]])


def _end_s(schedule: ScheduleResult, devices: list[int]) -> FloatArray:
    seconds = dict.fromkeys(devices, 0.0)
    for device_sum in schedule.sums:
        seconds[device_sum.device] += device_sum.finish_s - device_sum.start_s
    for update in schedule.updates:
        seconds[update.device] += update.finish_s - update.start_s
    return np.array([seconds[device] for device in devices])
