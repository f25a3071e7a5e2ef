"""What FSDP2 adds to a stage of a pipeline: gathered weights, and the collectives that make them.

As torch.distributed.pipelining (2.13) runs stages that `fully_shard` was called on, each block and
the stage as a whole. A forward gathers what is not whole; where forwards reshard, they free each
block after it, though not the root, what is in no block. A backward gathers what is not whole too,
and frees nothing: the next forward finds it whole. Gradients are added up whole over the
microbatches, and scattered once, at the end, when the weights are freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from fxpart.core.blocks import Block, blocks_of, share, weights_read
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.topology import Link
from fxpart.cost.collectives import CollectiveCurves, collective_time_s
from fxpart.schedule.stage_storages import Lifetimes

__all__ = [
    "Collective",
    "Gathered",
    "StageNeeds",
    "StageShards",
    "WeightShards",
    "gathered_after",
    "stage_needs",
    "stage_shards",
]

_SLOTS = 8
"""Places in time for each operator: collectives and copies come before it, the root's first."""
_FORWARD_AHEAD, _BACKWARD_AHEAD = 2, 1
"""Gathers run so many blocks ahead, as FSDP2 records its events."""


class Gathered(IntEnum):
    """What is gathered of a stage."""

    NOTHING = 0
    ROOT = 1
    ALL = 2


@dataclass(frozen=True, eq=False, slots=True)
class WeightShards:
    """Which weights replicas share, and what they share them over."""

    replicas: int
    gradients: tuple[int, ...]
    """Numbers of the gradients, among those of the graph, whose weights are sharded."""
    reshards: bool
    """Whether a forward frees what it has gathered."""
    links: Sequence[Link]
    """The slowest between replicas, by device."""
    curves: CollectiveCurves | None = None
    """What a library makes of them, as of `collective_time_s`."""


class Collective(NamedTuple):
    """An all-gather or a reduce-scatter of one block."""

    kind: str
    size_bytes: int
    """Of the whole."""
    seconds: float


class StageNeeds(NamedTuple):
    """What a forward or a backward needs, by what is gathered when it begins."""

    gathered_bytes: int = 0
    """Of the weights that are whole then; the peaks count them too."""
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    first_backward_peak_bytes: int = 0
    forward_wait_s: float = 0.0
    """By how much collectives and their copies lengthen a forward."""
    backward_wait_s: float = 0.0
    forward_copy_s: float = 0.0
    """The part of it that is copies."""
    backward_copy_s: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class StageShards:
    """A stage with sharded weights."""

    needs: tuple[StageNeeds, StageNeeds, StageNeeds]
    """By what is `Gathered`."""
    reshards: bool
    gathers: tuple[Collective, ...]
    """Of its blocks, the root first."""
    roots: int
    """1 where there is a root, else 0."""
    scatters: tuple[Collective, ...]
    whole_bytes: int
    """Of all weights that are gathered."""
    shard_bytes: int
    """Of this replica's part of them."""
    reduce_s: float
    """Of the scatters and their copies, one after the other."""
    reduce_peak_bytes: int
    """The most while they run, beside what there is but gathered weights and their gradients."""
    gradient_bytes: int
    """Of the whole gradients that are scattered."""

    def after(self, kind: str) -> Gathered:
        """Return what is gathered after a forward, ``F``, or a backward, ``B``."""
        return Gathered.ROOT if kind == "F" and self.reshards else Gathered.ALL

    def without_collectives(self) -> "StageShards":
        """Return the same where collectives take no time, and their copies do."""
        needs = [
            n._replace(forward_wait_s=n.forward_copy_s, backward_wait_s=n.backward_copy_s)
            for n in self.needs
        ]
        reduce_s = self.reduce_s - sum(scatter.seconds for scatter in self.scatters)
        return replace(self, needs=(needs[0], needs[1], needs[2]), reduce_s=reduce_s)

    def collectives(self, kinds: Iterable[str]) -> Iterator[Collective]:
        """Yield what a step runs whose forwards and backwards come in the order of `kinds`."""
        gathered = Gathered.NOTHING
        for kind in kinds:
            if gathered != Gathered.ALL:
                yield from self.gathers[self.roots if gathered == Gathered.ROOT else 0 :]
            gathered = self.after(kind)
        yield from self.scatters


class Stage(Protocol):
    """What a forward and a backward of a stage hold, whoever runs them."""

    @property
    def forward_peak_bytes(self) -> int: ...
    @property
    def backward_peak_bytes(self) -> int: ...
    @property
    def first_backward_peak_bytes(self) -> int: ...
    @property
    def shards(self) -> StageShards | None: ...


def stage_needs(stage: Stage, gathered: Gathered) -> StageNeeds:
    """Return what a forward or backward of `stage` needs that finds so much `gathered`."""
    if stage.shards is not None:
        return stage.shards.needs[gathered]
    return StageNeeds(
        0, stage.forward_peak_bytes, stage.backward_peak_bytes, stage.first_backward_peak_bytes
    )


def gathered_after(stage: Stage, kind: str) -> Gathered:
    """Return what is gathered of `stage` after a forward, ``F``, or backward, ``B``."""
    return stage.shards.after(kind) if stage.shards is not None else Gathered.NOTHING


def stage_shards(
    graph: OpGraph,
    ops: IntArray,
    op_s: FloatArray,
    *,
    shards: WeightShards,
    device: int,
    copy_bytes_per_s: float,
    lifetimes: tuple[Lifetimes, Lifetimes, Lifetimes],
) -> StageShards | None:
    """Return what shards add to a stage; None where none of its weights is sharded.

    Args:
        graph: a training step of one microbatch.
        ops: the stage's operators in order, without updates.
        op_s: the time of each of them.
        shards: what is sharded.
        device: the one that the stage is on.
        copy_bytes_per_s: rate of copies into and out of buffers, read and written.
        lifetimes: of what its forward holds, its backward, and the first backward.

    """
    blocks = _blocks(graph, ops, shards)
    if not blocks:
        return None
    sizes = [int(graph.weight_bytes[list(block.weights)].sum()) for block in blocks]
    buffers = [_padded(graph, block, shards.replicas) for block in blocks]
    gathers, scatters = (
        tuple(_collective(kind, size, shards, device) for size in buffers)
        for kind in ("all_gather", "reduce_scatter")
    )
    plan = _Stage(graph, blocks, sizes, buffers, shards.reshards)
    copies_s = [2 * size / copy_bytes_per_s for size in buffers]
    taken_s = [(c.seconds, copy_s) for c, copy_s in zip(gathers, copies_s, strict=True)]
    forward = np.asarray(ops) < graph.first_backward
    works = ((ops[forward], op_s[forward]), (ops[~forward], op_s[~forward]))
    nothing, root, whole = (_needs(plan, has, lifetimes, works, taken_s) for has in Gathered)
    reduce_peak_bytes, gradient_bytes = _reduced(graph, blocks, ops, plan, shards.replicas)
    return StageShards(
        needs=(nothing, root, whole),
        reshards=shards.reshards,
        gathers=gathers,
        roots=plan.roots,
        scatters=scatters,
        whole_bytes=sum(sizes),
        shard_bytes=sum(size // shards.replicas for size in buffers),
        reduce_s=sum(c.seconds for c in scatters) + sum(copies_s),
        reduce_peak_bytes=reduce_peak_bytes,
        gradient_bytes=gradient_bytes,
    )


@lru_cache(maxsize=2)
def _weights_read(graph: OpGraph, gradients: tuple[int, ...]) -> list[list[int]]:
    """Return what `weights_read` does of the weights of `gradients`: the same for all stages."""
    return weights_read(graph, graph.gradient_weights[np.array(gradients, dtype=np.int64)])


def _blocks(graph: OpGraph, ops: IntArray, shards: WeightShards) -> list[Block]:
    """Return the blocks of the weights that the forward of `ops` reads."""
    read, first = _weights_read(graph, shards.gradients), graph.first_backward
    here = {w for op in ops[ops < first].tolist() for w in read[op]}
    there = [g for g in shards.gradients if int(graph.gradient_weights[g]) in here]
    return blocks_of(graph, read, there, ops.tolist()) if there else []


def _padded(graph: OpGraph, block: Block, replicas: int) -> int:
    sizes = graph.weight_bytes[list(block.weights)].tolist()
    return sum(share(size, replicas) for size in sizes) * replicas


def _collective(kind: str, size: int, shards: WeightShards, device: int) -> Collective:
    link = shards.links[device]
    seconds = collective_time_s(kind, size, shards.replicas, link, shards.curves)
    return Collective(kind, size, seconds)


class _Stage:
    """Lifetimes of gathered weights and of buffers, in places of `_SLOTS` for each operator."""

    def __init__(
        self,
        graph: OpGraph,
        blocks: Sequence[Block],
        sizes: Sequence[int],
        buffers: Sequence[int],
        reshards: bool,
    ) -> None:
        self.blocks, self.sizes, self.buffers = blocks, sizes, buffers
        self.reshards, self.roots = reshards, int(not blocks[0].name)
        self.forward_end = _SLOTS * graph.first_backward
        self.backward_start = _SLOTS * (graph.first_backward + 1)
        self.end = _SLOTS * graph.n_ops

    def _whole(self, gathered: Gathered) -> int:
        """Return the number of blocks that are whole, which come first."""
        return (0, self.roots, len(self.blocks))[gathered]

    def held_bytes(self, gathered: Gathered) -> int:
        """Return the bytes of the weights that are whole."""
        return sum(self.sizes[: self._whole(gathered)])

    def gathered_forward(self, gathered: Gathered) -> list[int]:
        """Return the blocks that a forward gathers, in order."""
        return list(range(self._whole(gathered), len(self.blocks)))

    def gathered_backward(self, gathered: Gathered) -> list[int]:
        """Return the blocks that a backward gathers, in order."""
        numbers = self.gathered_forward(gathered)
        return sorted(numbers, key=lambda i: self.blocks[i].first_backward)

    def place(self, block: int, op: int) -> int:
        """Return when the gather before an operator begins; its copy comes next."""
        return _SLOTS * (op + 1) - (2 if self.blocks[block].name else 4)

    def forward(self, gathered: Gathered) -> Lifetimes:
        """Return what is alive in a forward."""
        order, lives = self.gathered_forward(gathered), []
        for index, block in enumerate(order):
            begin = self.place(block, self.blocks[block].first)
            following = order[index + 1] if index + 1 < len(order) else None
            freed = (
                self.forward_end
                if following is None
                else self.place(following, self.blocks[following].first)
            )
            lives.append((begin, freed, self.buffers[block]))
        for block, span in enumerate(self.blocks):
            begin = self.place(block, span.first) + 1 if block in order else 0
            frees = self.reshards and block >= self.roots
            end = _SLOTS * (span.last + 1) if frees else self.forward_end
            lives.append((begin, end, self.sizes[block]))
        return Lifetimes.of(lives)

    def backward(self, gathered: Gathered) -> Lifetimes:
        """Return what is alive in a backward, each block gathered while the one before runs."""
        order, lives = self.gathered_backward(gathered), []
        begin = self.backward_start
        for block in order:
            copied = max(begin, self.place(block, self.blocks[block].first_backward) + 1)
            lives.append((begin, copied, self.buffers[block]))
            lives.append((copied, self.end, self.sizes[block]))
            begin = copied + 1
        whole = [block for block in range(len(self.blocks)) if block not in order]
        lives += [(self.backward_start, self.end, self.sizes[block]) for block in whole]
        return Lifetimes.of(lives)


def _needs(
    plan: _Stage,
    gathered: Gathered,
    lifetimes: Sequence[Lifetimes],
    works: Sequence[tuple[IntArray, FloatArray]],
    taken_s: Sequence[tuple[float, float]],
) -> StageNeeds:
    """Return what `works`, a forward and a backward, need that find so much `gathered`."""
    backward = plan.backward(gathered)
    peaks = [
        both.over(_SLOTS).beside(lives).peak(plan.end + 2 * _SLOTS)
        for both, lives in zip(lifetimes, (plan.forward(gathered), backward, backward), strict=True)
    ]
    orders = (plan.gathered_forward(gathered), plan.gathered_backward(gathered))
    waits_s = [
        _wait_s(plan, order, work, taken_s, ahead)
        for order, work, ahead in zip(orders, works, (_FORWARD_AHEAD, _BACKWARD_AHEAD), strict=True)
    ]
    copied_s = [sum(taken_s[block][1] for block in order) for order in orders]
    return StageNeeds(plan.held_bytes(gathered), *peaks, *waits_s, *copied_s)


def _wait_s(
    plan: _Stage,
    order: Sequence[int],
    work: tuple[IntArray, FloatArray],
    taken_s: Sequence[tuple[float, float]],
    ahead: int,
) -> float:
    """Return by how much gathers, one after the other on a stream, and copies lengthen `work`.

    `taken_s` are the times of both, by block.
    """
    ops, op_s = work
    before_s = np.concatenate([[0.0], np.cumsum(op_s)])
    now_s = gathered_s = done_s = 0.0
    copied_s: list[float] = []
    for block in order:
        span = plan.blocks[block]
        first = span.first if ahead == _FORWARD_AHEAD else span.first_backward
        until_s = max(done_s, float(before_s[np.searchsorted(ops, first)]))
        begin_s = max(gathered_s, copied_s[-ahead] if len(copied_s) >= ahead else 0.0)
        gathered_s = begin_s + taken_s[block][0]
        now_s = max(now_s + until_s - done_s, gathered_s) + taken_s[block][1]
        done_s = until_s
        copied_s.append(now_s)
    return now_s - done_s


def _reduced(
    graph: OpGraph, blocks: Sequence[Block], ops: IntArray, plan: _Stage, replicas: int
) -> tuple[int, int]:
    """Return the most bytes while gradients are scattered block by block, and those of them all.

    The weights of a block are freed, its gradients copied into a buffer, which is kept until that
    of the next one is made, and freed.
    """
    stage = set(ops.tolist())
    made = [[g for g in block.gradients if int(_maker(graph, g)) in stage] for block in blocks]
    gradients = [int(graph.weight_bytes[graph.gradient_weights[m]].sum()) for m in made]
    most = left = sum(plan.sizes) + sum(gradients)
    shards = 0
    for size, whole, buffer in zip(plan.sizes, gradients, plan.buffers, strict=True):
        left -= size
        most = max(most, left + buffer + shards)
        left, shards = left - whole, shards + buffer // replicas
        most = max(most, left + buffer + shards)
    return most, sum(gradients)


def _maker(graph: OpGraph, gradient: int) -> int:
    return int(graph.value_producer[graph.gradient_values[gradient]])
