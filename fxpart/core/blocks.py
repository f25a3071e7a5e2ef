"""Blocks of weights that FSDP2 all-gathers together, and the operators that need them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.module_paths import block_of
from fxpart.core.optimizer import ITEMSIZE

__all__ = ["COPY", "GATHER", "Block", "blocks_of", "reduced_bytes", "share", "weights_read"]

GATHER, COPY = "fsdp.all_gather", "fsdp.copy"
"""Targets of an all-gather, which produces the whole tensor, and of copies from and to buffers."""


@dataclass(frozen=True, slots=True)
class Block:
    """Weights that are all-gathered together, and the operators that need them."""

    name: str
    """Path of the outermost numbered module; empty for the root, which has all other weights."""
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    """Weights without a gradient."""
    gradients: tuple[int, ...]
    """Indices into the gradients of the graph."""
    first: int
    """First forward operator."""
    last: int
    first_backward: int
    """First backward operator; `last` if there is none."""
    last_backward: int

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights that are gathered."""
        return self.trained + self.frozen

    @property
    def has_backward(self) -> bool:
        """Whether the backward runs any of its operators."""
        return self.last_backward > self.last


def share(size_bytes: int, replicas: int) -> int:
    """Return the bytes of each replica's shard of a tensor."""
    return -(-size_bytes // replicas)


def reduced_bytes(
    graph: OpGraph, gradients: Sequence[int], reduce_dtype: str | None, replicas: int = 1
) -> int:
    """Return the bytes of gradients in the dtype of their reduction, padded to equal shards.

    Args:
        graph: a training step.
        gradients: indices of its gradients.
        reduce_dtype: the dtype in which replicas sum and accumulate them; None for their own.
        replicas: number of shards.

    """
    makers = graph.value_producer[graph.gradient_values[list(gradients)]].tolist()
    weights = graph.gradient_weights[list(gradients)].tolist()
    size_of = {}
    for weight, maker in zip(weights, makers, strict=True):
        size = share(int(graph.weight_bytes[weight]), replicas) * replicas
        if reduce_dtype is not None:
            size = size // ITEMSIZE[graph.dtypes[maker]] * ITEMSIZE[reduce_dtype]
        size_of[weight] = size
    return sum(size_of.values())


def weights_read(graph: OpGraph, sharded: IntArray) -> list[list[int]]:
    """Return which of the `sharded` weights each operator reads, directly or through a view."""
    all_sharded = set(sharded.tolist())
    viewed: dict[int, list[int]] = {}
    read: list[list[int]] = []
    starts = np.searchsorted(graph.value_producer, np.arange(graph.n_ops + 1)).tolist()
    base, alloc = graph.value_base.tolist(), graph.value_alloc_bytes.tolist()
    uses, use_start = graph.uses.tolist(), graph.use_start.tolist()
    reads, read_start = graph.reads.tolist(), graph.read_start.tolist()
    for op in range(graph.n_ops):
        weights = [w for w in uses[use_start[op] : use_start[op + 1]] if w in all_sharded]
        for value in reads[read_start[op] : read_start[op + 1]]:
            weights += viewed.get(value, [])
        weights = list(dict.fromkeys(weights))
        read.append(weights)
        for value in range(starts[op], starts[op + 1]):
            if base[value] >= 0:
                viewed[value] = viewed.get(base[value], [])
            elif alloc[value] == 0 and weights:
                viewed[value] = weights
    return read


def blocks_of(
    graph: OpGraph,
    read: Sequence[Sequence[int]],
    sharded: Sequence[int],
    ops: Sequence[int],
    frozen: Sequence[int] = (),
) -> list[Block]:
    """Return the blocks of sharded weights in forward order, the root first.

    Args:
        graph: a training step.
        read: the result of `weights_read` for it.
        sharded: indices of the sharded gradients.
        ops: the operators to consider, in order, such as those of a stage; the root spans them all.
        frozen: the sharded weights without a gradient.

    """
    start, op_set = graph.first_backward, frozenset(ops)
    gradients_of: dict[str, list[int]] = {}
    frozen_of: dict[str, list[int]] = {}
    for g, weight in zip(sharded, graph.gradient_weights[list(sharded)].tolist(), strict=True):
        gradients_of.setdefault(block_of(graph.weight_names[weight]), []).append(g)
    for weight in frozen:
        frozen_of.setdefault(block_of(graph.weight_names[weight]), []).append(weight)
    names = dict.fromkeys([*gradients_of, *frozen_of])
    ops_of: dict[str, list[int]] = {name: [] for name in names}
    for op in ops:
        used = {block_of(graph.modules[op])}
        used |= {block_of(graph.weight_names[w]) for w in read[op]}
        for name in used & names.keys():
            ops_of[name].append(op)
    root_ops = {True: [op for op in ops if op < start], False: [op for op in ops if op >= start]}
    blocks = []
    for name in names:
        gradients = gradients_of.get(name, [])
        trained = tuple(dict.fromkeys(graph.gradient_weights[gradients].tolist()))
        forward = [op for op in ops_of[name] if op < start] if name else root_ops[True]
        backward = [op for op in ops_of[name] if op >= start] if name else root_ops[False]
        makers = graph.value_producer[graph.gradient_values[gradients]].tolist()
        backward += [op for op in makers if op in op_set]
        if not backward:
            backward = [forward[-1]]
        if not name:  # the root is needed from the start of the backward
            backward.append(start)
        ends = forward[0], forward[-1], min(backward), max(backward)
        frozen_weights = tuple(frozen_of.get(name, []))
        blocks.append(Block(name, trained, frozen_weights, tuple(gradients), *ends))
    return sorted(blocks, key=lambda block: (block.first, bool(block.name)))
