"""The storages of one pipeline stage for a microbatch, with their lifetimes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.cost.kernels import RESIDENT
from fxpart.cost.tables import MemoryTables
from fxpart.support.compiled import compiled

__all__ = ["Lifetimes", "StageBytes", "peak_of_intervals", "stage_bytes", "stage_storages"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage; `fxpart.schedule.costs.StageCost` documents the fields."""

    gradient: int
    inputs: int
    output: int
    saved: int
    forward: "Lifetimes"
    """Lifetimes during a forward."""
    backward: "Lifetimes"
    first_backward: "Lifetimes"
    """Lifetimes during the backward of the first microbatch, whose gradients stay live."""


@dataclass(frozen=True, eq=False, slots=True)
class Lifetimes:
    """Storages that live from `birth` through `last`, with their bytes; equal lengths."""

    birth: IntArray
    last: IntArray
    size: IntArray

    @classmethod
    def of(cls, lives: Sequence[tuple[int, int, int]]) -> "Lifetimes":
        """Build from triples of birth, last and size."""
        columns = np.array(lives, dtype=np.int64).reshape(-1, 3).T
        return cls(columns[0], columns[1], columns[2])

    def over(self, slots: int) -> "Lifetimes":
        """Rescale time to `slots` points per operator, leaving one operator's before the first."""
        return Lifetimes(slots * (self.birth + 1), slots * (self.last + 1), self.size)

    def beside(self, others: "Lifetimes") -> "Lifetimes":
        """Return the union with `others`."""
        both = ((self.birth, others.birth), (self.last, others.last), (self.size, others.size))
        return Lifetimes(*(np.concatenate(pair) for pair in both))

    def peak(self, n: int) -> int:
        """Return the peak in bytes over `n` points in time."""
        return peak_of_intervals(self.birth, self.last, self.size, n)


@compiled
def stage_storages(
    m: MemoryTables, stage_of: IntArray, stage: int
) -> tuple[IntArray, IntArray, BoolArray, int]:
    """Return (owner of each value's storage, its last use, whether it is a result, input bytes).

    The second and third are indexed by owner. This is `fxpart.cost.kernels.device_memory` for a
    device with only this stage, except that results of the model do not live longer.
    """
    count = m.producer.shape[0]
    root = np.full(count, -1, dtype=np.int64)
    last = np.zeros(count, dtype=np.int64)
    is_result = np.zeros(count, dtype=np.bool_)
    inputs = 0
    for op in range(stage_of.shape[0]):
        if stage_of[op] != stage:
            continue
        for i in range(m.read_start[op], m.read_start[op + 1]):
            value = m.reads[i]
            if root[value] == -1:
                root[value] = value
                if m.producer[value] < 0:
                    root[value] = RESIDENT
                    inputs += m.alloc_bytes[value]
            if root[value] >= 0:
                last[root[value]] = max(last[root[value]], op)
        for value in range(m.made_start[op], m.made_start[op + 1]):
            base = m.base[value]
            root[value] = root[base] if base >= 0 else value
            if root[value] >= 0:
                last[root[value]] = max(last[root[value]], op)
                # Variables reference the original, not a received copy.
                if stage_of[m.producer[root[value]]] == stage:
                    last[root[value]] = max(last[root[value]], m.held[value])
                is_result[root[value]] |= m.is_output[value]
    return root, last, is_result, inputs


def stage_bytes(
    memory: MemoryTables, stage_of: IntArray, stage: int, first_backward: int
) -> StageBytes:
    """Return the bytes of a stage for one microbatch.

    Args:
        memory: tables of a graph with n operators.
        stage_of: stage of each operator. Length n.
        stage: index of the stage.
        first_backward: the first operator of the backward; n if there is none.

    """
    root, last, is_result, inputs = stage_storages(memory, stage_of, stage)
    owner = np.flatnonzero(root == np.arange(len(root)))
    birth, last, is_result = memory.producer[owner], last[owner], is_result[owner]
    born_here = stage_of[birth] == stage
    size = np.where(born_here, memory.alloc_bytes[owner], memory.value_bytes[owner])
    early = birth < first_backward
    saved = early & (last >= first_backward) & ~is_result
    n = len(stage_of)
    # Results and saved activations live to the end of the forward.
    lives_on = early & (is_result | saved)
    until = np.where(lives_on, first_backward - 1, last)[early]
    late, since = saved | ~early, np.maximum(birth, first_backward)
    is_gradient = is_result & ~early
    first_last = np.where(is_gradient, n - 1, last)[late]
    return StageBytes(
        gradient=int(size[is_gradient].sum()),
        inputs=int(inputs),
        output=int(size[is_result & early].sum()),
        saved=int(size[saved].sum()),
        forward=Lifetimes(birth[early], until, size[early]),
        backward=Lifetimes(since[late], last[late], size[late]),
        first_backward=Lifetimes(since[late], first_last, size[late]),
    )


def peak_of_intervals(birth: IntArray, last: IntArray, size: IntArray, n: int) -> int:
    """Return the peak in bytes of storages that live from `birth` through `last`."""
    change = np.zeros(n + 2, dtype=np.int64)
    np.add.at(change, birth, size)
    np.subtract.at(change, last + 1, size)
    return int(np.cumsum(change).max(initial=0))
