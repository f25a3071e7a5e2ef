"""What each stage holds in a process of torch's pipeline engine, for one micro-batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.problem import Problem
from fxpart.cost.tables import MemoryTables, freed_after_readers
from fxpart.schedule.from_assignment import stages_of, tied_parts
from fxpart.schedule.stage_shards import StageShards, WeightShards, stage_shards
from fxpart.schedule.stage_storages import Lifetimes, stage_storages

__all__ = [
    "Crossing",
    "CutStep",
    "EngineStage",
    "EngineStorages",
    "crossing",
    "engine_stages",
]


# Values that stages pass on when each receives from the stage before it only.

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Crossing:
    """From which stage to which each value goes in a forward; length V each."""

    first: IntArray
    """The stage that has it first: that makes it, or 0 for an input."""
    last: IntArray
    """The last stage that needs it; all between pass it on. Not above `first` for a value that
    stays where it is."""
    trained: BoolArray
    """Whether it is real-valued and depends on weights, so that its gradient comes back."""

    def received(self, stage: int) -> BoolArray:
        """Return which values `stage` receives from the one before."""
        received: BoolArray = (self.first < stage) & (self.last >= stage)
        return received


def crossing(graph: OpGraph, stage_of: IntArray) -> Crossing:
    """Return what crosses in the forward of `graph`, whose operators are of the given stages.

    A result of the model that an earlier stage makes is passed on to the last stage. A value has
    the dtype that its operator computes in.
    """
    made = graph.value_producer >= 0
    maker = np.where(made, graph.value_producer, 0)
    first = np.where(made, stage_of[maker], 0)
    last = first.copy()
    readers, first_backward = graph.readers, graph.first_backward
    forward = readers < first_backward
    np.maximum.at(last, graph.reads[forward], stage_of[readers[forward]])
    early = maker < first_backward
    last[made & early & graph.value_is_output] = stage_of.max()
    return Crossing(
        np.where(early, first, 0), np.where(early, last, 0), made & early & _trained(graph)[maker]
    )


def _trained(graph: OpGraph) -> BoolArray:
    """Return whether an operator computes real numbers that depend on weights. Length n."""
    trained = np.diff(graph.use_start) > 0
    for op in range(graph.n_ops):
        if not trained[op]:
            makers = graph.value_producer[graph.reads_of(op)]
            trained[op] = trained[makers[makers >= 0]].any()
        trained[op] &= "float" in graph.dtypes[op]
    return trained


# Storages that a stage allocates in a process of torch's pipeline engine, and their lifetimes.


@dataclass(frozen=True, eq=False, slots=True)
class CutStep:
    """A step of one micro-batch, cut in stages."""

    graph: OpGraph
    """With n operators and V values."""
    memory: MemoryTables
    """Of `graph`."""
    stage_of: IntArray
    """Stage of each operator. Length n."""
    passed: Crossing
    """What the stages pass on."""
    parts: BoolArray
    """Which values are one stage's part of a weight's gradient. Length V."""


@dataclass(frozen=True, eq=False, slots=True)
class EngineStorages:
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
    saved: BoolArray
    """Whether the backward uses it; the part of `held` that is so."""
    sent: BoolArray
    """Whether the forward hands it on."""
    gradient: BoolArray
    """Whether it is a weight's gradient, or the part that this stage has of one."""
    returned: BoolArray
    """Whether the backward hands it on."""
    copied_bytes: int
    """Of copies that the forward hands on."""

    def bytes_of(self, chosen: BoolArray) -> int:
        """Return the bytes of all storages that `chosen` says, of the length of the others."""
        return int(self.size[chosen].sum())


def _engine_storages(cut: CutStep, stage: int) -> EngineStorages:
    """Return what a stage makes; what it receives lies in buffers of the engine.

    Raises:
        SpecError: for a graph whose backward does not come last.

    """
    graph, first_backward = cut.graph, cut.graph.first_backward
    root, last, is_result, _ = stage_storages(cut.memory, cut.stage_of, stage)
    owner = np.flatnonzero((root == np.arange(len(root))) & (graph.value_producer >= 0))
    # The parts of a gradient are added up after the step, not by these operators.
    adds = _adds(cut)[graph.value_producer[owner]]
    owner = owner[(cut.stage_of[graph.value_producer[owner]] == stage) & ~adds]
    birth, last, is_result = graph.value_producer[owner], last[owner], is_result[owner]
    early = birth < first_backward
    whole, copied_bytes = _handed_on(cut, root, stage)
    sent = early & _lie_in(root, whole)[owner]
    gradient = ~early & (is_result | _lie_in(root, _own_parts(cut, stage))[owner])
    saved = early & (last >= first_backward)
    return EngineStorages(
        birth=birth,
        last=last,
        size=graph.value_alloc_bytes[owner],
        early=early,
        held=saved | (early & (sent | is_result)),
        saved=saved,
        sent=sent,
        gradient=gradient,
        returned=~early & ~gradient & _lie_in(root, _handed_back(cut, stage))[owner],
        copied_bytes=copied_bytes,
    )


def _lie_in(root: IntArray, values: IntArray) -> BoolArray:
    """Return which storages the given values lie in. Length V."""
    inside = np.zeros(len(root), dtype=np.bool_)
    homes = root[values]
    inside[homes[homes >= 0]] = True
    return inside


def _handed_on(cut: CutStep, root: IntArray, stage: int) -> tuple[IntArray, int]:
    """Return what the forward hands on as it is, and the bytes of copies that it hands on.

    A view of another size than its storage is taken to be copied: tensors travel dense.
    """
    graph, passed = cut.graph, cut.passed
    handed_on = np.flatnonzero((passed.first == stage) & (passed.last > stage))
    handed_on = handed_on[(graph.value_producer[handed_on] >= 0) & (root[handed_on] >= 0)]
    whole = graph.value_bytes[handed_on] == graph.value_alloc_bytes[root[handed_on]]
    return handed_on[whole], int(graph.value_bytes[handed_on[~whole]].sum())


def _adds(cut: CutStep) -> BoolArray:
    """Return which operators add up parts of a gradient. Length n."""
    adds = np.zeros(cut.graph.n_ops, dtype=np.bool_)
    adds[cut.graph.readers[cut.parts[cut.graph.reads]]] = True
    return adds


def _own_parts(cut: CutStep, stage: int) -> IntArray:
    """Return the values that `stage` makes and that are its part of a gradient: sent, or added."""
    graph, parts = cut.graph, cut.parts.copy()
    parts[graph.reads[_adds(cut)[graph.readers]]] = True
    values = np.flatnonzero(parts & (graph.value_producer >= 0))
    stage_parts: IntArray = values[cut.stage_of[graph.value_producer[values]] == stage]
    return stage_parts


def _handed_back(cut: CutStep, stage: int) -> IntArray:
    """Return what `stage` makes and the backward of an earlier one reads, parts left out."""
    graph, stage_of = cut.graph, cut.stage_of
    maker = graph.value_producer[graph.reads]
    back = (maker >= graph.first_backward) & (stage_of[maker] == stage)
    back &= (stage_of[graph.readers] < stage) & ~cut.parts[graph.reads]
    values: IntArray = graph.reads[back]
    return values


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
    shards: StageShards | None = None
    """Where replicas share its weights by FSDP2; `weight_bytes` then has their shards instead."""


def engine_stages(
    problem: Problem, assignment: Assignment, shards: WeightShards | None = None
) -> tuple[EngineStage, ...]:
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
    # The engine runs the split graph, whose values no variable of the model's Python holds.
    memory = freed_after_readers(problem.memory)
    cut = CutStep(graph, memory, of_engine, passed, parts)
    stages = []
    for stage, device in enumerate(devices):
        made = _engine_storages(cut, stage)
        ops, n = np.flatnonzero(of_engine == stage), graph.n_ops
        lives = (_forward(cut, made), *_backwards(cut, made))
        shared = None
        if shards is not None:
            # Times are of no concern here.
            shared = stage_shards(
                graph,
                ops,
                np.zeros(len(ops)),
                shards=shards,
                device=device,
                copy_bytes_per_s=1.0,
                lifetimes=lives,
            )
        peaks = (lives[0].peak(n), lives[1].peak(n), lives[2].peak(n))
        stages.append(_stage(cut, stage, made, peaks, shared))
    return tuple(stages)


def _stage(
    cut: CutStep,
    stage: int,
    made: EngineStorages,
    peaks: tuple[int, int, int],
    shards: StageShards | None,
) -> EngineStage:
    """Return what a stage holds: sums over what it makes, and what lies in buffers."""
    held_bytes = made.bytes_of(made.held) + made.copied_bytes
    forward_peak_bytes, backward_peak_bytes, first_backward_peak_bytes = peaks
    input_bytes, received_bytes, received_gradient_bytes = _buffers(cut, stage)
    return EngineStage(
        weight_bytes=_weight_bytes(cut, stage)
        - (shards.whole_bytes - shards.shard_bytes if shards else 0),
        gradient_bytes=made.bytes_of(made.gradient),
        input_bytes=input_bytes,
        received_bytes=received_bytes,
        received_gradient_bytes=received_gradient_bytes,
        held_bytes=held_bytes,
        sent_bytes=made.bytes_of(made.sent) + made.copied_bytes,
        sent_gradient_bytes=made.bytes_of(made.returned),
        # The copies exist at the end of the forward.
        forward_peak_bytes=max(forward_peak_bytes, held_bytes),
        backward_peak_bytes=backward_peak_bytes,
        first_backward_peak_bytes=first_backward_peak_bytes,
        shards=shards,
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


def _forward(cut: CutStep, made: EngineStorages) -> Lifetimes:
    """Return what is alive during a forward, copies left out."""
    of_it = made.early
    until = np.where(made.held, cut.graph.first_backward - 1, made.last)
    return Lifetimes(made.birth[of_it], until[of_it], made.size[of_it])


def _backwards(cut: CutStep, made: EngineStorages) -> tuple[Lifetimes, Lifetimes]:
    """Return what is alive during a backward, and during the first, whose gradients stay."""
    n = cut.graph.n_ops
    # What is handed on is counted beside the backward anyway.
    of_it = (made.saved & ~made.sent) | ~made.early
    since = np.maximum(made.birth, cut.graph.first_backward)[of_it]
    until = np.where(made.returned, n - 1, made.last)
    until_first = np.where(made.gradient, n - 1, until)
    size = made.size[of_it]
    return Lifetimes(since, until[of_it], size), Lifetimes(since, until_first[of_it], size)
