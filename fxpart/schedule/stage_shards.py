"""Costs of FSDP2 in a pipeline stage: gathered weights and their collectives.

This models torch.distributed.pipelining (2.13) on stages with `fully_shard` applied to each block
and to the stage as a whole. A forward gathers all weights that are sharded; if forwards reshard,
each block is freed after use, but not the root, which has the weights outside of blocks. A backward
also gathers sharded weights, and frees nothing, so the next forward finds them whole. Whole
gradients are accumulated over microbatches, and scattered once at the end, when the weights are
freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from fxpart.core.blocks import Block, blocks_of, reduced_bytes, share, weights_read
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
"""Points in time per operator, for collectives and copies before it (the root's come first)."""
_FORWARD_AHEAD, _BACKWARD_AHEAD = 2, 1
"""Number of blocks that gathers may run ahead, as in FSDP2's events."""


class Gathered(IntEnum):
    """Which weights of a stage are gathered."""

    NOTHING = 0
    ROOT = 1
    ALL = 2


@dataclass(frozen=True, eq=False, slots=True)
class WeightShards:
    """The weights that are sharded over replicas, and the links between those."""

    replicas: int
    gradients: tuple[int, ...]
    """Indices of the graph's gradients whose weights are sharded."""
    reshards: bool
    """Whether a forward frees gathered weights."""
    links: Sequence[Link]
    """The slowest link between replicas, by device."""
    curves: CollectiveCurves | None = None
    """Measured curves of these links, as for `collective_time_s`."""
    reduce_dtype: str | None = None
    """The dtype in which gradients are accumulated and scattered; None for their own."""


class Collective(NamedTuple):
    """An all-gather or a reduce-scatter of one block."""

    kind: str
    size_bytes: int
    """Size of the whole tensor."""
    seconds: float


class StageNeeds(NamedTuple):
    """Memory and stalls of a forward and a backward, given what is gathered when they begin."""

    gathered_bytes: int = 0
    """Weights that are gathered at the beginning; included in the peaks."""
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    first_backward_peak_bytes: int = 0
    forward_wait_s: float = 0.0
    """Time that collectives and their copies add to a forward."""
    backward_wait_s: float = 0.0
    forward_copy_s: float = 0.0
    """The part of `forward_wait_s` for copies."""
    backward_copy_s: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class StageShards:
    """A stage with sharded weights."""

    needs: tuple[StageNeeds, StageNeeds, StageNeeds]
    """Indexed by `Gathered`."""
    reshards: bool
    gathers: tuple[Collective, ...]
    """All-gathers of its blocks, the root first."""
    roots: int
    """1 if there is a root, else 0."""
    scatters: tuple[Collective, ...]
    whole_bytes: int
    """Size of all sharded weights when gathered."""
    shard_bytes: int
    """Size of this replica's shards of them."""
    reduce_s: float
    """Total time of the scatters and their copies, which are sequential."""
    reduce_peak_bytes: int
    """Peak of gathered weights, gradients, buffers and shards during the scatters, on top of
    everything else."""
    gradient_bytes: int
    """Size of the whole gradients that are scattered."""
    accumulation_bytes: int = 0
    """What these need beyond the dtype of a microbatch's own gradients; included."""

    def after(self, kind: str) -> Gathered:
        """Return what is gathered after a forward (``F``) or a backward (``B``)."""
        return Gathered.ROOT if kind == "F" and self.reshards else Gathered.ALL

    def without_collectives(self) -> "StageShards":
        """Return the same costs with free collectives, but not free copies."""
        needs = [
            n._replace(forward_wait_s=n.forward_copy_s, backward_wait_s=n.backward_copy_s)
            for n in self.needs
        ]
        reduce_s = self.reduce_s - sum(scatter.seconds for scatter in self.scatters)
        return replace(self, needs=(needs[0], needs[1], needs[2]), reduce_s=reduce_s)

    def collectives(self, kinds: Iterable[str]) -> Iterator[Collective]:
        """Yield the collectives of a step with forwards and backwards in the order of `kinds`."""
        gathered = Gathered.NOTHING
        for kind in kinds:
            if gathered != Gathered.ALL:
                yield from self.gathers[self.roots if gathered == Gathered.ROOT else 0 :]
            gathered = self.after(kind)
        yield from self.scatters


class Stage(Protocol):
    """Peaks of a stage's forward and backward, in any runtime."""

    @property
    def forward_peak_bytes(self) -> int: ...
    @property
    def backward_peak_bytes(self) -> int: ...
    @property
    def first_backward_peak_bytes(self) -> int: ...
    @property
    def shards(self) -> StageShards | None: ...


def stage_needs(stage: Stage, gathered: Gathered) -> StageNeeds:
    """Return the needs of a forward or backward of `stage` that begins with `gathered` weights."""
    if stage.shards is not None:
        return stage.shards.needs[gathered]
    return StageNeeds(
        0, stage.forward_peak_bytes, stage.backward_peak_bytes, stage.first_backward_peak_bytes
    )


def gathered_after(stage: Stage, kind: str) -> Gathered:
    """Return what is gathered of `stage` after a forward (``F``) or backward (``B``)."""
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
    """Return the costs of sharded weights in a stage, or None if it has none.

    Args:
        graph: a training step of one microbatch.
        ops: the stage's operators in order, without updates.
        op_s: time of each of these operators.
        shards: the sharded weights.
        device: device of the stage.
        copy_bytes_per_s: rate of copies into and out of buffers, reads plus writes.
        lifetimes: storages of its forward, its backward, and the first backward.

    """
    blocks = _blocks(graph, ops, shards)
    if not blocks:
        return None
    sizes = [int(graph.weight_bytes[list(block.weights)].sum()) for block in blocks]
    buffers = [_padded(graph, block, shards.replicas) for block in blocks]
    reduced = [
        reduced_bytes(graph, block.gradients, shards.reduce_dtype, shards.replicas)
        for block in blocks
    ]
    gathers, scatters = (
        tuple(_collective(kind, size, shards, device) for size in sizes_of_kind)
        for kind, sizes_of_kind in (("all_gather", buffers), ("reduce_scatter", reduced))
    )
    plan = _Stage(graph, blocks, sizes, buffers, shards.reshards)
    copies_s = [2 * size / copy_bytes_per_s for size in buffers]
    block_times_s = [(c.seconds, copy_s) for c, copy_s in zip(gathers, copies_s, strict=True)]
    forward = np.asarray(ops) < graph.first_backward
    stage_ops = set(ops.tolist())
    # Others are terms of other stages.
    gradients = [[g for g in block.gradients if _maker(graph, g) in stage_ops] for block in blocks]
    kept, cast = _accumulated(graph, blocks, gradients, shards.reduce_dtype)
    lifetimes = (lifetimes[0], lifetimes[1].beside(kept), lifetimes[2].beside(cast))
    works = ((ops[forward], op_s[forward]), (ops[~forward], op_s[~forward]))
    nothing, root, whole = (
        _needs(plan, gathered, lifetimes, works, block_times_s) for gathered in Gathered
    )
    gradient_bytes = [reduced_bytes(graph, made, shards.reduce_dtype) for made in gradients]
    return StageShards(
        needs=(nothing, root, whole),
        reshards=shards.reshards,
        gathers=gathers,
        roots=plan.roots,
        scatters=scatters,
        whole_bytes=sum(sizes),
        shard_bytes=sum(size // shards.replicas for size in buffers),
        reduce_s=sum(c.seconds for c in scatters) + 2 * sum(reduced) / copy_bytes_per_s,
        reduce_peak_bytes=_reduce_peak_bytes(plan, gradient_bytes, reduced, shards.replicas),
        gradient_bytes=sum(gradient_bytes),
        accumulation_bytes=int(cast.size.sum()),
    )


@lru_cache(maxsize=2)
def _weights_read(graph: OpGraph, gradients: tuple[int, ...]) -> list[list[int]]:
    """Return `weights_read` for the weights of `gradients`, cached for all stages."""
    return weights_read(graph, graph.gradient_weights[np.array(gradients, dtype=np.int64)])


def _blocks(graph: OpGraph, ops: IntArray, shards: WeightShards) -> list[Block]:
    """Return the blocks of the sharded weights read by the forward of `ops`."""
    read, first = _weights_read(graph, shards.gradients), graph.first_backward
    stage_weights = {w for op in ops[ops < first].tolist() for w in read[op]}
    stage_gradients = [
        g for g in shards.gradients if int(graph.gradient_weights[g]) in stage_weights
    ]
    return blocks_of(graph, read, stage_gradients, ops.tolist()) if stage_gradients else []


def _padded(graph: OpGraph, block: Block, replicas: int) -> int:
    sizes = graph.weight_bytes[list(block.weights)].tolist()
    return sum(share(size, replicas) for size in sizes) * replicas


def _collective(kind: str, size: int, shards: WeightShards, device: int) -> Collective:
    link = shards.links[device]
    seconds = collective_time_s(kind, size, shards.replicas, link, shards.curves)
    return Collective(kind, size, seconds)


class _Stage:
    """Lifetimes of gathered weights and buffers, with `_SLOTS` points in time per operator."""

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
        """Return the number of gathered blocks, which come first."""
        return (0, self.roots, len(self.blocks))[gathered]

    def held_bytes(self, gathered: Gathered) -> int:
        """Return the bytes of the gathered weights."""
        return sum(self.sizes[: self._whole(gathered)])

    def gathered_forward(self, gathered: Gathered) -> list[int]:
        """Return the blocks gathered by a forward, in order."""
        return list(range(self._whole(gathered), len(self.blocks)))

    def gathered_backward(self, gathered: Gathered) -> list[int]:
        """Return the blocks gathered by a backward, in order."""
        numbers = self.gathered_forward(gathered)
        return sorted(numbers, key=lambda i: self.blocks[i].first_backward)

    def place(self, block: int, op: int) -> int:
        """Return the point in time of the gather before an operator; its copy comes next."""
        return _SLOTS * (op + 1) - (2 if self.blocks[block].name else 4)

    def forward(self, gathered: Gathered) -> Lifetimes:
        """Return the lifetimes in a forward."""
        order, lives = self.gathered_forward(gathered), []
        for index, block in enumerate(order):
            begin = self.place(block, self.blocks[block].first)
            following = order[index + 1] if index + 1 < len(order) else None
            freed = (
                self.forward_end
                if following is None
                else self.place(following, self.blocks[following].first) + 1
            )
            lives.append((begin, freed, self.buffers[block]))
        for block, span in enumerate(self.blocks):
            begin = self.place(block, span.first) + 1 if block in order else 0
            frees = self.reshards and block >= self.roots
            end = _SLOTS * (span.last + 1) if frees else self.forward_end
            lives.append((begin, end, self.sizes[block]))
        return Lifetimes.of(lives)

    def backward(self, gathered: Gathered) -> Lifetimes:
        """Return the lifetimes in a backward, which prefetches the next block."""
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
    block_times_s: Sequence[tuple[float, float]],
) -> StageNeeds:
    """Return the needs of `works`, a forward and a backward, that begin with `gathered` weights."""
    backward = plan.backward(gathered)
    peaks = [
        lived.over(_SLOTS).beside(lives).peak(plan.end + 2 * _SLOTS)
        for lived, lives in zip(
            lifetimes, (plan.forward(gathered), backward, backward), strict=True
        )
    ]
    orders = (plan.gathered_forward(gathered), plan.gathered_backward(gathered))
    waits_s = [
        _wait_s(plan, order, work, block_times_s, ahead)
        for order, work, ahead in zip(orders, works, (_FORWARD_AHEAD, _BACKWARD_AHEAD), strict=True)
    ]
    copied_s = [sum(block_times_s[block][1] for block in order) for order in orders]
    return StageNeeds(plan.held_bytes(gathered), *peaks, *waits_s, *copied_s)


def _wait_s(
    plan: _Stage,
    order: Sequence[int],
    work: tuple[IntArray, FloatArray],
    block_times_s: Sequence[tuple[float, float]],
    ahead: int,
) -> float:
    """Return the time added to `work` by gathers, sequential on one stream, and copies.

    `block_times_s` has the times of both, by block.
    """
    ops, op_s = work
    before_s = np.concatenate([[0.0], np.cumsum(op_s)])
    end_s = gathered_s = work_done_s = 0.0
    copied_s: list[float] = []
    for block in order:
        span = plan.blocks[block]
        first = span.first if ahead == _FORWARD_AHEAD else span.first_backward
        until_s = max(work_done_s, float(before_s[np.searchsorted(ops, first)]))
        begin_s = max(gathered_s, copied_s[-ahead] if len(copied_s) >= ahead else 0.0)
        gathered_s = begin_s + block_times_s[block][0]
        end_s = max(end_s + until_s - work_done_s, gathered_s) + block_times_s[block][1]
        work_done_s = until_s
        copied_s.append(end_s)
    return end_s - work_done_s


def _accumulated(
    graph: OpGraph,
    blocks: Sequence[Block],
    gradients: Sequence[Sequence[int]],
    reduce_dtype: str | None,
) -> tuple[Lifetimes, Lifetimes]:
    """Return what gradients of another dtype than that of their sum add to each backward.

    FSDP2 adds the gradients of a block to their sums after its backward, until which they live. In
    the first backward it casts them instead; here each is as large as its cast from the start.

    Args:
        graph: a training step of one microbatch.
        blocks: the blocks of the stage.
        gradients: those that it computes, by block.
        reduce_dtype: as in `WeightShards`.

    Returns:
        What is added to a backward, and to the first one.

    """
    kept, cast = [], []
    for block, of_block in zip(blocks, gradients, strict=True) if reduce_dtype else ():
        for gradient in of_block:
            maker, own_bytes = _maker(graph, gradient), reduced_bytes(graph, [gradient], None)
            more_bytes = reduced_bytes(graph, [gradient], reduce_dtype) - own_bytes
            if more_bytes:
                kept.append((maker + 1, block.last_backward, own_bytes))
                cast.append((maker, graph.n_ops - 1, more_bytes))
    return Lifetimes.of(kept), Lifetimes.of(cast)


def _reduce_peak_bytes(
    plan: _Stage, gradients: Sequence[int], reduced: Sequence[int], replicas: int
) -> int:
    """Return the peak while gradients are scattered block by block.

    For each block, the weights are freed, and the gradients are copied into a buffer and freed. The
    buffer is kept until the next one is allocated. What is scattered is cast to the dtype of the
    weights.

    Args:
        plan: the stage.
        gradients: bytes of the gradients of each block.
        reduced: bytes of its buffer.
        replicas: number of shards.

    """
    peak = live_bytes = sum(plan.sizes) + sum(gradients)
    shards = 0
    sizes = zip(plan.sizes, gradients, plan.buffers, reduced, strict=True)
    for size, whole, weights, buffer in sizes:
        live_bytes -= size
        peak = max(peak, live_bytes + buffer + shards)
        part, own_part = buffer // replicas, weights // replicas
        live_bytes, shards = live_bytes - whole, shards + own_part
        peak = max(peak, live_bytes + buffer + shards + (part if part != own_part else 0))
    return peak


def _maker(graph: OpGraph, gradient: int) -> int:
    return int(graph.value_producer[graph.gradient_values[gradient]])
