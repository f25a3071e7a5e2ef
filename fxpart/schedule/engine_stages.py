"""Memory of each stage in a process of torch's pipeline engine, for one microbatch."""

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


# Values forwarded between stages, each of which receives only from the previous one.

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Crossing:
    """The range of stages that each value travels in a forward; length V each."""

    first: IntArray
    """The stage that produces it, or 0 for an input."""
    last: IntArray
    """The last stage that needs it; all stages between forward it. At most `first` if it is not
    sent."""
    trained: BoolArray
    """Whether it is real-valued and depends on weights, so that it has a gradient."""

    def received(self, stage: int) -> BoolArray:
        """Return which values `stage` receives from the previous one."""
        received: BoolArray = (self.first < stage) & (self.last >= stage)
        return received


def crossing(graph: OpGraph, stage_of: IntArray) -> Crossing:
    """Return the values that cross stages in the forward of `graph`.

    A result of the model produced by an earlier stage is forwarded to the last stage. A value has
    the dtype that its operator computes in.
    """
    is_produced = graph.value_producer >= 0
    maker = np.where(is_produced, graph.value_producer, 0)
    first = np.where(is_produced, stage_of[maker], 0)
    last = first.copy()
    readers, first_backward = graph.readers, graph.first_backward
    forward = readers < first_backward
    np.maximum.at(last, graph.reads[forward], stage_of[readers[forward]])
    early = maker < first_backward
    last[is_produced & early & graph.value_is_output] = stage_of.max()
    return Crossing(
        np.where(early, first, 0),
        np.where(early, last, 0),
        is_produced & early & _trained(graph)[maker],
    )


def _trained(graph: OpGraph) -> BoolArray:
    """Return whether each operator computes real numbers that depend on weights. Length n."""
    trained = np.diff(graph.use_start) > 0
    for op in range(graph.n_ops):
        if not trained[op]:
            makers = graph.value_producer[graph.reads_of(op)]
            trained[op] = trained[makers[makers >= 0]].any()
        trained[op] &= "float" in graph.dtypes[op]
    return trained


# Storages allocated by a stage in a process of torch's pipeline engine, and their lifetimes.


@dataclass(frozen=True, eq=False, slots=True)
class CutStep:
    """A step of one microbatch, cut into stages."""

    graph: OpGraph
    """The graph, with n operators and V values."""
    memory: MemoryTables
    """Tables of `graph`."""
    stage_of: IntArray
    """Stage of each operator. Length n."""
    passed: Crossing
    """Values that cross stages."""
    parts: BoolArray
    """Whether a value is one stage's term of a weight's gradient. Length V."""


@dataclass(frozen=True, eq=False, slots=True)
class EngineStorages:
    """The storages allocated by a stage, one item each."""

    birth: IntArray
    """Operator that allocates it."""
    last: IntArray
    """The last operator of the stage that uses it."""
    size: IntArray
    """Bytes."""
    early: BoolArray
    """Whether it is allocated in the forward."""
    held: BoolArray
    """Whether it lives from the forward to the backward."""
    saved: BoolArray
    """Whether the backward uses it; a subset of `held`."""
    sent: BoolArray
    """Whether the forward sends it."""
    gradient: BoolArray
    """Whether it is a weight's gradient, or this stage's term of one."""
    returned: BoolArray
    """Whether the backward sends it."""
    copied_bytes: int
    """Bytes of copies that the forward sends."""

    def bytes_of(self, chosen: BoolArray) -> int:
        """Return the bytes of the storages in the mask `chosen`."""
        return int(self.size[chosen].sum())


def _engine_storages(cut: CutStep, stage: int) -> EngineStorages:
    """Return the storages of a stage; received tensors are in buffers of the engine instead.

    Raises:
        SpecError: if the backward of the graph does not come last.

    """
    graph, first_backward = cut.graph, cut.graph.first_backward
    root, last, is_result, _ = stage_storages(cut.memory, cut.stage_of, stage)
    owner = np.flatnonzero((root == np.arange(len(root))) & (graph.value_producer >= 0))
    # The engine sums the terms of a gradient after the step, not with these operators.
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
    """Return a mask of the storages that contain the given values. Length V."""
    inside = np.zeros(len(root), dtype=np.bool_)
    homes = root[values]
    inside[homes[homes >= 0]] = True
    return inside


def _handed_on(cut: CutStep, root: IntArray, stage: int) -> tuple[IntArray, int]:
    """Return the values that the forward sends without a copy, and the bytes of copies it sends.

    A view of another size than its storage is assumed to be copied, as tensors are sent dense.
    """
    graph, passed = cut.graph, cut.passed
    handed_on = np.flatnonzero((passed.first == stage) & (passed.last > stage))
    handed_on = handed_on[(graph.value_producer[handed_on] >= 0) & (root[handed_on] >= 0)]
    whole = graph.value_bytes[handed_on] == graph.value_alloc_bytes[root[handed_on]]
    return handed_on[whole], int(graph.value_bytes[handed_on[~whole]].sum())


def _adds(cut: CutStep) -> BoolArray:
    """Return which operators sum terms of a gradient. Length n."""
    adds = np.zeros(cut.graph.n_ops, dtype=np.bool_)
    adds[cut.graph.readers[cut.parts[cut.graph.reads]]] = True
    return adds


def _own_parts(cut: CutStep, stage: int) -> IntArray:
    """Return the values of `stage` that are terms of a gradient, sent or summed."""
    graph, parts = cut.graph, cut.parts.copy()
    parts[graph.reads[_adds(cut)[graph.readers]]] = True
    values = np.flatnonzero(parts & (graph.value_producer >= 0))
    stage_parts: IntArray = values[cut.stage_of[graph.value_producer[values]] == stage]
    return stage_parts


def _handed_back(cut: CutStep, stage: int) -> IntArray:
    """Return the values of `stage` read by the backward of an earlier one, except terms."""
    graph, stage_of = cut.graph, cut.stage_of
    maker = graph.value_producer[graph.reads]
    back = (maker >= graph.first_backward) & (stage_of[maker] == stage)
    back &= (stage_of[graph.readers] < stage) & ~cut.parts[graph.reads]
    values: IntArray = graph.reads[back]
    return values


@dataclass(frozen=True, slots=True)
class EngineStage:
    """Memory of one stage, per microbatch except for weights and gradients.

    Received tensors are in buffers, which count neither as saved nor in the peaks.
    """

    weight_bytes: int
    """Weights without optimizer state, since the engine runs no updates."""
    gradient_bytes: int
    """Gradients of its weights, allocated by the first backward and accumulated into later. A
    weight used by several stages has one in each."""
    input_bytes: int
    """Model inputs; only in the first stage, which forwards those that later ones need."""
    received_bytes: int
    """Bytes received for its forward, including values that it only forwards."""
    received_gradient_bytes: int
    """Gradients received for the values that it sends."""
    held_bytes: int
    """Allocated by the forward and live until the backward of the microbatch: activations saved for
    it, and values that are sent. Without a backward, also the model's results."""
    sent_bytes: int
    """The part of `held_bytes` that is sent, without values that are only forwarded."""
    sent_gradient_bytes: int
    """Gradients sent by its backward."""
    forward_peak_bytes: int
    """Peak during a forward, including `held_bytes`."""
    backward_peak_bytes: int
    """Peak during a backward, including the part of `held_bytes` that it needs and was not sent,
    and gradients of weights until they are accumulated."""
    first_backward_peak_bytes: int
    """Peak during the backward of the first microbatch, whose gradients of weights stay live."""
    shards: StageShards | None = None
    """Costs of weights sharded by FSDP2, if any; `weight_bytes` then counts only shards."""


def engine_stages(
    problem: Problem, assignment: Assignment, shards: WeightShards | None = None
) -> tuple[EngineStage, ...]:
    """Return the memory of the stages of a placement, each in its own process.

    Weight updates are left out, since the engine runs only forwards and backwards.

    Raises:
        FxpartError: as `fxpart.schedule.stage_costs`.

    """
    graph = problem.graph
    stage_of, devices = stages_of(graph, assignment)
    passed, parts = crossing(graph, stage_of), tied_parts(graph, stage_of)
    # Updates belong to no stage.
    of_engine = np.where(graph.is_update, len(devices), stage_of)
    # The engine runs the split graph, without the model's Python variables.
    memory = freed_after_readers(problem.memory)
    cut = CutStep(graph, memory, of_engine, passed, parts)
    stages = []
    for stage, device in enumerate(devices):
        storages = _engine_storages(cut, stage)
        ops, n = np.flatnonzero(of_engine == stage), graph.n_ops
        lifetimes = (_forward(cut, storages), *_backwards(cut, storages))
        sharded = None
        if shards is not None:
            # Only memory matters here, not times.
            sharded = stage_shards(
                graph,
                ops,
                np.zeros(len(ops)),
                shards=shards,
                device=device,
                copy_bytes_per_s=1.0,
                lifetimes=lifetimes,
            )
        peaks = (lifetimes[0].peak(n), lifetimes[1].peak(n), lifetimes[2].peak(n))
        stages.append(_stage(cut, stage, storages, peaks, sharded))
    return tuple(stages)


def _stage(
    cut: CutStep,
    stage: int,
    storages: EngineStorages,
    peaks: tuple[int, int, int],
    shards: StageShards | None,
) -> EngineStage:
    """Sum the storages and buffers of a stage."""
    held_bytes = storages.bytes_of(storages.held) + storages.copied_bytes
    forward_peak_bytes, backward_peak_bytes, first_backward_peak_bytes = peaks
    input_bytes, received_bytes, received_gradient_bytes = _buffers(cut, stage)
    return EngineStage(
        weight_bytes=_weight_bytes(cut, stage)
        - (shards.whole_bytes - shards.shard_bytes if shards else 0),
        gradient_bytes=storages.bytes_of(storages.gradient)
        + (shards.accumulation_bytes if shards else 0),
        input_bytes=input_bytes,
        received_bytes=received_bytes,
        received_gradient_bytes=received_gradient_bytes,
        held_bytes=held_bytes,
        sent_bytes=storages.bytes_of(storages.sent) + storages.copied_bytes,
        sent_gradient_bytes=storages.bytes_of(storages.returned),
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
    """Return the bytes of model inputs, of received values and of received gradients."""
    graph, received = cut.graph, cut.passed.received(stage)
    inputs = (graph.value_producer < 0) & (stage == 0)
    training = graph.first_backward < graph.n_ops
    returning = cut.passed.received(stage + 1) & cut.passed.trained & training
    return (
        int(graph.value_bytes[inputs].sum()),
        int(graph.value_bytes[received].sum()),
        int(graph.value_bytes[returning].sum()),
    )


def _forward(cut: CutStep, storages: EngineStorages) -> Lifetimes:
    """Return the storages that are live during a forward, without copies."""
    early = storages.early
    until = np.where(storages.held, cut.graph.first_backward - 1, storages.last)
    return Lifetimes(storages.birth[early], until[early], storages.size[early])


def _backwards(cut: CutStep, storages: EngineStorages) -> tuple[Lifetimes, Lifetimes]:
    """Return the storages live during a backward, and during the first, whose gradients stay."""
    n = cut.graph.n_ops
    # Sent values are counted separately.
    is_live = (storages.saved & ~storages.sent) | ~storages.early
    since = np.maximum(storages.birth, cut.graph.first_backward)[is_live]
    until = np.where(storages.returned, n - 1, storages.last)
    until_first = np.where(storages.gradient, n - 1, until)
    size = storages.size[is_live]
    return Lifetimes(since, until[is_live], size), Lifetimes(since, until_first[is_live], size)
