"""What each stage holds in a process of torch's pipeline engine, for one micro-batch."""

from dataclasses import dataclass

import numpy as np

from fxpart.assignment import Assignment
from fxpart.problem import Problem
from fxpart.schedule.crossing import crossing
from fxpart.schedule.engine_storages import CutStep, EngineStorages, engine_storages
from fxpart.schedule.from_assignment import stages_of
from fxpart.schedule.stage_storages import peak_of_intervals
from fxpart.schedule.tied_parts import tied_parts

__all__ = ["EngineStage", "engine_stages"]


@dataclass(frozen=True, slots=True)
class EngineStage:
    """One stage. Bytes are of one micro-batch, but for weights and gradients.

    What a stage receives lies in buffers, which are no part of what it saves or of its peaks.
    """

    weight_bytes: int
    """Without what an optimizer keeps for them: the engine makes no updates."""
    gradient_bytes: int
    """Of the gradients of its weights: made by the first backward, those of later ones are added.
    A weight that several stages use has one in each."""
    input_bytes: int
    """Of the model's inputs; of the first stage only, which passes on what later ones need."""
    received_bytes: int
    """Of what it receives for its forward, what it only passes on included."""
    received_gradient_bytes: int
    """Of the gradients of what it hands on."""
    held_bytes: int
    """Made by the forward and there until the backward of the micro-batch: what that needs, and
    what is handed on. Without a backward, also the model's results."""
    sent_bytes: int
    """The part of `held_bytes` that is handed on, without what is only passed on."""
    sent_gradient_bytes: int
    """Of the gradients that its backward hands on."""
    forward_peak_bytes: int
    """The most alive at once during a forward, `held_bytes` counted."""
    backward_peak_bytes: int
    """The most alive at once during a backward: what it needs of `held_bytes` and does not hand on
    counted, gradients of weights until they are added to what there is."""
    first_backward_peak_bytes: int
    """The same for the first micro-batch, whose gradients of weights stay."""


def engine_stages(problem: Problem, assignment: Assignment) -> tuple[EngineStage, ...]:
    """Return what the stages of a placement hold, each in a process of its own.

    Updates of weights are left out: the engine runs forwards and backwards alone.

    Raises:
        SpecError: as `fxpart.schedule.stage_costs`.

    """
    graph = problem.graph
    stage_of, devices = stages_of(graph, assignment)
    passed, parts = crossing(graph, stage_of), tied_parts(graph, stage_of)
    # An update is of none of the stages.
    of_engine = np.where(graph.is_update, len(devices), stage_of)
    cut = CutStep(graph, problem.memory, of_engine, passed, parts)
    return tuple(_stage(cut, stage) for stage in range(len(devices)))


def _stage(cut: CutStep, stage: int) -> EngineStage:
    """Return what a stage holds: sums over what it makes, and what lies in buffers."""
    made = engine_storages(cut, stage)
    held_bytes = made.bytes_of(made.held) + made.copied_bytes
    backward_peak_bytes, first_backward_peak_bytes = _backward_peaks(cut, made)
    input_bytes, received_bytes, received_gradient_bytes = _buffers(cut, stage)
    return EngineStage(
        weight_bytes=_weight_bytes(cut, stage),
        gradient_bytes=made.bytes_of(made.gradient),
        input_bytes=input_bytes,
        received_bytes=received_bytes,
        received_gradient_bytes=received_gradient_bytes,
        held_bytes=held_bytes,
        sent_bytes=made.bytes_of(made.sent) + made.copied_bytes,
        sent_gradient_bytes=made.bytes_of(made.returned),
        # The copies are there at the end of the forward.
        forward_peak_bytes=max(_forward_peak(cut, made), held_bytes),
        backward_peak_bytes=backward_peak_bytes,
        first_backward_peak_bytes=first_backward_peak_bytes,
    )


def _weight_bytes(cut: CutStep, stage: int) -> int:
    used = np.unique(cut.graph.uses[cut.stage_of[cut.graph.users] == stage])
    return int(cut.graph.weight_bytes[used].sum())


def _buffers(cut: CutStep, stage: int) -> tuple[int, int, int]:
    """Return the bytes of the model's inputs, of what arrives, and of gradients that come back."""
    graph, received = cut.graph, cut.passed.received(stage)
    inputs = (graph.value_producer < 0) & (stage == 0)
    training = graph.first_backward < graph.n_ops
    returning = cut.passed.received(stage + 1) & cut.passed.trained & training
    return (
        int(graph.value_bytes[inputs].sum()),
        int(graph.value_bytes[received].sum()),
        int(graph.value_bytes[returning].sum()),
    )


def _forward_peak(cut: CutStep, made: EngineStorages) -> int:
    """Return the most that is alive at once during a forward, copies left out."""
    graph, of_it = cut.graph, made.early
    until = np.where(made.held, graph.first_backward - 1, made.last)
    return peak_of_intervals(made.birth[of_it], until[of_it], made.size[of_it], graph.n_ops)


def _backward_peaks(cut: CutStep, made: EngineStorages) -> tuple[int, int]:
    """Return the most at once during a backward, and during the first, whose gradients stay."""
    n = cut.graph.n_ops
    # What is handed on is counted beside the backward anyway.
    of_it = (made.saved & ~made.sent) | ~made.early
    since = np.maximum(made.birth, cut.graph.first_backward)[of_it]
    until = np.where(made.returned, n - 1, made.last)
    until_first = np.where(made.gradient, n - 1, until)
    return (
        peak_of_intervals(since, until[of_it], made.size[of_it], n),
        peak_of_intervals(since, until_first[of_it], made.size[of_it], n),
    )
