"""`engine_peak_bytes`: what the process of each stage holds when torch's engine runs the step.

`fxpart.schedule.simulate_schedule` says what a schedule needs; this says what the schedules of
torch.distributed.pipelining hold (as of torch 2.13), one stage on each device:

- a buffer for everything that a stage receives, for each micro-batch, through all steps;
- in training also one for each gradient that comes back to it;
- what a forward hands on, and the results of the last stage, until the micro-batch's backward;
  without a backward until the next step;
- in GPipe, what was sent, forward and backward, until the end of the step; in 1F1B, the gradients
  that were sent last, and the last results, until there are new ones.

Gradients of weights stay from the first backward on, a whole one in each stage that uses a weight.
"""

from collections.abc import Sequence

from fxpart.errors import SpecError
from fxpart.schedule.engine_stages import EngineStage
from fxpart.schedule.orders import Action, ordered_actions
from fxpart.schedule.stage_shards import Gathered, gathered_after, stage_needs

__all__ = ["ENGINE_SCHEDULES", "engine_peak_bytes"]

ENGINE_SCHEDULES = ("gpipe", "1f1b")
"""Schedules of torch's engine that can be run here."""


def engine_peak_bytes(
    name: str,
    stages: Sequence[EngineStage],
    microbatches: int,
    *,
    training: bool,
    result_bytes: int = 0,
) -> tuple[int, ...]:
    """Return the most bytes of tensors alive in each stage's process at any time of a step.

    What a kernel allocates for itself is not counted, and neither are copies of received tensors
    that a stage writes to.

    Args:
        name: ``gpipe`` or ``1f1b``.
        stages: in order, as `fxpart.schedule.engine_stages` returns them.
        microbatches: how many of them a step has.
        training: whether there is a backward.
        result_bytes: of what the model returns for a micro-batch, where the graph of a training
            step, which returns the loss, does not say it.

    Raises:
        SpecError: for another schedule, or less than one micro-batch.

    """
    if name not in ENGINE_SCHEDULES:
        raise SpecError(
            f"what torch's engine holds is known for {' and '.join(ENGINE_SCHEDULES)}, got"
            f" schedule={name}; take one of these"
        )
    rows = ordered_actions(name, len(stages), 1, microbatches, training=training)
    results = [0] * (len(stages) - 1) + [result_bytes]
    return tuple(
        _fixed(stage, microbatches) + _peak(stage, row, kept, keeps_sent=name == "gpipe")
        for stage, row, kept in zip(stages, rows, results, strict=True)
    )


def _fixed(stage: EngineStage, microbatches: int) -> int:
    """Return what is there throughout: weights, inputs and buffers."""
    each = stage.input_bytes + stage.received_bytes + stage.received_gradient_bytes
    return stage.weight_bytes + microbatches * each


def _peak(stage: EngineStage, row: Sequence[Action], result: int, *, keeps_sent: bool) -> int:
    """Return the most of the rest; `result` bytes are held beside what the graph says."""
    live_bytes, peak, backwards, forwards, gathered = 0, 0, 0, 0, Gathered.NOTHING
    for kind, _, _ in row:
        needs = stage_needs(stage, gathered)
        gathered = gathered_after(stage, kind)
        kept_bytes = live_bytes - needs.gathered_bytes
        live_bytes += stage_needs(stage, gathered).gathered_bytes - needs.gathered_bytes
        if kind == "F":
            # The results of the forward before are let go of when there are new ones.
            before = result if backwards and forwards == backwards else 0
            peak = max(peak, kept_bytes + before + needs.forward_peak_bytes + result)
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
