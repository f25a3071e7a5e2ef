"""What a stage makes in a process of torch's pipeline engine, and what becomes of each storage."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.cost.tables import MemoryTables
from fxpart.graph import IntArray, OpGraph
from fxpart.schedule.crossing import Crossing
from fxpart.schedule.stage_storages import stage_storages

__all__ = ["CutStep", "EngineStorages", "engine_storages"]

BoolArray = npt.NDArray[np.bool_]


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


def engine_storages(cut: CutStep, stage: int) -> EngineStorages:
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
    found = np.zeros(len(root), dtype=np.bool_)
    homes = root[values]
    found[homes[homes >= 0]] = True
    return found


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
    found = np.zeros(cut.graph.n_ops, dtype=np.bool_)
    found[cut.graph.readers[cut.parts[cut.graph.reads]]] = True
    return found


def _own_parts(cut: CutStep, stage: int) -> IntArray:
    """Return the values that `stage` makes and that are its part of a gradient: sent, or added."""
    graph, mine = cut.graph, cut.parts.copy()
    mine[graph.reads[_adds(cut)[graph.readers]]] = True
    values = np.flatnonzero(mine & (graph.value_producer >= 0))
    own: IntArray = values[cut.stage_of[graph.value_producer[values]] == stage]
    return own


def _handed_back(cut: CutStep, stage: int) -> IntArray:
    """Return what `stage` makes and the backward of an earlier one reads, parts left out."""
    graph, stage_of = cut.graph, cut.stage_of
    maker = graph.value_producer[graph.reads]
    back = (maker >= graph.first_backward) & (stage_of[maker] == stage)
    back &= (stage_of[graph.readers] < stage) & ~cut.parts[graph.reads]
    values: IntArray = graph.reads[back]
    return values
