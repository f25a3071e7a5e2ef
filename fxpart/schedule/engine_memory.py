"""`engine_peak_bytes`: memory of each stage's process when torch's engine runs a step.

`fxpart.schedule.simulate_schedule` predicts what a schedule needs; this module predicts what the
schedules of torch.distributed.pipelining keep (as of torch 2.13), with one stage per device:

- a receive buffer per value and microbatch, for all steps;
- in training also one for each gradient that it receives;
- the outputs of a forward, and the results of the last stage, until the microbatch's backward, or
  without a backward until the next step;
- in GPipe, everything sent, forward and backward, until the end of the step; in 1F1B, the
  gradients sent last and the last results, until they are replaced.

Gradients of weights live from the first backward on, in full in each stage that uses the weight.
"""

from collections.abc import Sequence

from fxpart.errors import SpecError
from fxpart.schedule.engine_stages import EngineStage
from fxpart.schedule.orders import Action, ordered_actions
from fxpart.schedule.stage_shards import Gathered, gathered_after, stage_needs

__all__ = ["ENGINE_SCHEDULES", "engine_peak_bytes"]

ENGINE_SCHEDULES = ("gpipe", "1f1b")
"""Supported schedules of torch's engine."""


def engine_peak_bytes(
    name: str,
    stages: Sequence[EngineStage],
    microbatches: int,
    *,
    training: bool,
    result_bytes: int = 0,
) -> tuple[int, ...]:
    """Return the peak of live tensors in each stage's process over a step.

    Kernel workspaces are not counted, nor are copies of received tensors that a stage writes to.

    Args:
        name: ``gpipe`` or ``1f1b``.
        stages: the stages in order, from `fxpart.schedule.engine_stages`.
        microbatches: number of microbatches per step.
        training: whether there is a backward.
        result_bytes: size of the model's result for a microbatch, if the graph of a training step,
            which returns the loss, does not have it.

    Raises:
        SpecError: if the schedule is not supported, or there is less than one microbatch.

    """
    if name not in ENGINE_SCHEDULES:
        raise SpecError(
            f"what torch's engine holds is known for {' and '.join(ENGINE_SCHEDULES)}, got"
            f" schedule={name}; take one of these"
        )
    rows = ordered_actions(name, len(stages), 1, microbatches, training=training)
    results = [0] * (len(stages) - 1) + [result_bytes]
    return tuple(
        _fixed(stage, microbatches)
        + _peak(stage, row, stage_result_bytes, keeps_sent=name == "gpipe")
        for stage, row, stage_result_bytes in zip(stages, rows, results, strict=True)
    )


def _fixed(stage: EngineStage, microbatches: int) -> int:
    """Return the resident bytes: weights, inputs and buffers."""
    buffer_bytes = stage.input_bytes + stage.received_bytes + stage.received_gradient_bytes
    return stage.weight_bytes + microbatches * buffer_bytes


def _peak(stage: EngineStage, row: Sequence[Action], result: int, *, keeps_sent: bool) -> int:
    """Return the peak of everything else; `result` bytes are live besides the graph's tensors."""
    live_bytes, peak, backwards, forwards, gathered = 0, 0, 0, 0, Gathered.NOTHING
    for kind, _, _ in row:
        needs = stage_needs(stage, gathered)
        gathered = gathered_after(stage, kind)
        kept_bytes = live_bytes - needs.gathered_bytes
        live_bytes += stage_needs(stage, gathered).gathered_bytes - needs.gathered_bytes
        if kind == "F":
            # The results of the previous forward are freed when new ones replace them.
            previous_result = result if backwards and forwards == backwards else 0
            peak = max(peak, kept_bytes + previous_result + needs.forward_peak_bytes + result)
            live_bytes += stage.held_bytes + result
            forwards += 1
            continue
        kept_bytes -= stage.held_bytes - stage.sent_bytes
        if backwards:
            peak = max(peak, kept_bytes + needs.backward_peak_bytes)
        else:
            peak = max(peak, kept_bytes + needs.first_backward_peak_bytes)
            live_bytes += stage.gradient_bytes
        live_bytes -= stage.held_bytes + result
        if keeps_sent:
            live_bytes += stage.sent_bytes + stage.sent_gradient_bytes
        elif not backwards:
            live_bytes += stage.sent_gradient_bytes
        backwards += 1
    if stage.shards:
        kept_bytes = live_bytes - stage.shards.whole_bytes - stage.shards.gradient_bytes
        peak = max(peak, kept_bytes + stage.shards.reduce_peak_bytes)
    return peak
