"""What each stage holds in a process of torch's pipeline engine, for one micro-batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.assignment import Assignment
from fxpart.cost.holding import weight_bytes_of
from fxpart.graph import IntArray, OpGraph
from fxpart.problem import Problem
from fxpart.schedule.crossing import Crossing, crossing
from fxpart.schedule.from_assignment import stages_of
from fxpart.schedule.stage_storages import peak_of_intervals, stage_storages
from fxpart.schedule.tied_parts import tied_parts

__all__ = ["EngineStage", "engine_stages"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EngineStage:
    """One stage. Bytes are of one micro-batch, but for weights and gradients.

    What a stage receives lies in buffers, which are no part of what it saves or of its peaks.
    """

    weight_bytes: int
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

    Raises:
        SpecError: as `fxpart.schedule.stage_costs`.

    """
    graph = problem.graph
    stage_of, _ = stages_of(graph, assignment)
    passed, parts = crossing(graph, stage_of), tied_parts(graph, stage_of)
    return tuple(
        _stage(problem, stage_of, passed, parts, stage) for stage in range(int(stage_of.max()) + 1)
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Storages:
    """The storages that a stage makes itself, an item each."""

    birth: IntArray
    """Operator that makes it."""
    last: IntArray
    """The last operator of the stage that uses it."""
    size: IntArray
    """Bytes."""
    early: BoolArray
    """Whether the forward makes it."""
    held: BoolArray
    """Whether it stays from the forward to the backward."""
    sent: BoolArray
    """Whether the forward hands it on."""
    gradient: BoolArray
    """Whether it is a weight's gradient, or the part that this stage has of one."""
    returned: BoolArray
    """Whether the backward hands it on."""
    copied_bytes: int
    """Of copies that the forward hands on."""


def _stage(
    problem: Problem, stage_of: IntArray, passed: Crossing, parts: BoolArray, stage: int
) -> EngineStage:
    graph, n = problem.graph, problem.graph.n_ops
    first_backward = _first_backward(graph)
    made = _made(problem, stage_of, passed, parts, stage)
    size, values, early = made.size, graph.value_bytes, made.early
    held_bytes = int(size[made.held].sum()) + made.copied_bytes
    kept = np.where(made.held, first_backward - 1, made.last)
    forward_peak = peak_of_intervals(made.birth[early], kept[early], size[early], n)
    # What is handed on is not counted again while the backward runs.
    late = (made.held & (made.last >= first_backward) & ~made.sent) | ~early
    since = np.maximum(made.birth, first_backward)[late]
    until = np.where(made.returned, n - 1, made.last)
    until_first = np.where(made.gradient, n - 1, until)
    returning = passed.received(stage + 1) & passed.trained & (first_backward < n)
    inputs = (graph.value_producer < 0) & (stage == 0)
    return EngineStage(
        weight_bytes=weight_bytes_of(problem.memory, np.flatnonzero(stage_of == stage)),
        gradient_bytes=int(size[made.gradient].sum()),
        input_bytes=int(values[inputs].sum()),
        received_bytes=int(values[passed.received(stage)].sum()),
        received_gradient_bytes=int(values[returning].sum()),
        held_bytes=held_bytes,
        sent_bytes=int(size[made.sent].sum()) + made.copied_bytes,
        sent_gradient_bytes=int(size[made.returned].sum()),
        forward_peak_bytes=max(forward_peak, held_bytes),
        backward_peak_bytes=peak_of_intervals(since, until[late], size[late], n),
        first_backward_peak_bytes=peak_of_intervals(since, until_first[late], size[late], n),
    )


def _first_backward(graph: OpGraph) -> int:
    backward = np.flatnonzero(graph.is_backward)
    return int(backward[0]) if len(backward) else graph.n_ops


def _made(
    problem: Problem, stage_of: IntArray, passed: Crossing, parts: BoolArray, stage: int
) -> _Storages:
    """Return what a stage makes; what it receives lies in buffers of the engine."""
    graph, first_backward = problem.graph, _first_backward(problem.graph)
    root, last, is_result, _ = stage_storages(problem.memory, stage_of, stage)
    owner = np.flatnonzero((root == np.arange(len(root))) & (graph.value_producer >= 0))
    # The parts of a gradient are added up after the step, not by these operators.
    own = (stage_of[graph.value_producer[owner]] == stage) & ~_sums(graph, parts)[owner]
    owner = owner[own]
    birth, last, is_result = graph.value_producer[owner], last[owner], is_result[owner]
    early = birth < first_backward
    sends, copied_bytes = _sent(graph, root, passed, stage)
    sent = early & sends[owner]
    part = _own_parts(graph, root, parts, stage_of, stage)[owner]
    gradient = ~early & (is_result | part)
    return _Storages(
        birth=birth,
        last=last,
        size=graph.value_alloc_bytes[owner],
        early=early,
        held=early & (sent | is_result | (last >= first_backward)),
        sent=sent,
        gradient=gradient,
        returned=~early & ~gradient & _returned(graph, root, parts, stage_of, stage)[owner],
        copied_bytes=copied_bytes,
    )


def _sent(graph: OpGraph, root: IntArray, passed: Crossing, stage: int) -> tuple[BoolArray, int]:
    """Return which storages a stage hands on as they are, and the bytes of copies it hands on.

    A view of another size than its storage is taken to be copied: tensors travel dense.
    """
    handed_on = np.flatnonzero((passed.first == stage) & (passed.last > stage))
    handed_on = handed_on[(graph.value_producer[handed_on] >= 0) & (root[handed_on] >= 0)]
    home = root[handed_on]
    whole = graph.value_bytes[handed_on] == graph.value_alloc_bytes[home]
    sends = np.zeros(graph.n_values, dtype=np.bool_)
    sends[home[whole]] = True
    return sends, int(graph.value_bytes[handed_on[~whole]].sum())


def _sums(graph: OpGraph, parts: BoolArray) -> BoolArray:
    """Return which values are made by adding up parts of a gradient. Length V."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    adds = np.zeros(graph.n_ops, dtype=np.bool_)
    adds[reader[parts[graph.reads]]] = True
    made = graph.value_producer >= 0
    found: BoolArray = made & adds[np.where(made, graph.value_producer, 0)]
    return found


def _own_parts(
    graph: OpGraph, root: IntArray, parts: BoolArray, stage_of: IntArray, stage: int
) -> BoolArray:
    """Return which storages of `stage` are its part of a gradient: sent, or added here."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    adds = np.unique(reader[parts[graph.reads]])
    added = graph.reads[np.isin(reader, adds)]
    mine = np.zeros(graph.n_values, dtype=np.bool_)
    mine[added] = True
    mine |= parts
    mine &= graph.value_producer >= 0
    mine[mine] = stage_of[graph.value_producer[mine]] == stage
    found = np.zeros(graph.n_values, dtype=np.bool_)
    found[root[mine & (root >= 0)]] = True
    return found


def _returned(
    graph: OpGraph, root: IntArray, parts: BoolArray, stage_of: IntArray, stage: int
) -> BoolArray:
    """Return which storages of `stage` the backward of an earlier one reads, parts left out."""
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    maker = graph.value_producer[graph.reads]
    away = (maker >= 0) & graph.is_backward[maker] & (stage_of[maker] == stage)
    away &= (stage_of[reader] < stage) & ~parts[graph.reads]
    found = np.zeros(graph.n_values, dtype=np.bool_)
    homes = root[graph.reads[away]]
    found[homes[homes >= 0]] = True
    return found
