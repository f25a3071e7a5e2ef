"""`with_zero`: shard the weights, gradients and updates of a training step over replicas.

This models torch's FSDP2 (`fully_shard` on every block and on the whole model); Rajbhandari et al.:
ZeRO: memory optimizations toward training trillion parameter models. SC 2020, arXiv:1910.02054.
Weights are stored as shards. Before a block runs, its weights are all-gathered into a buffer and
copied out; after its backward, its gradients are copied into a buffer and reduce-scattered. Buffers
have the lifetimes of FSDP2. Weights outside of numbered blocks belong to the root, which stays
gathered from the start of the forward to the end of the backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fxpart.core.blocks import COPY, GATHER, Block, blocks_of, reduced_bytes, share, weights_read
from fxpart.core.graph import IntArray, OpGraph, csr
from fxpart.errors import SpecError

__all__ = ["SCATTER", "STAGES", "WAIT", "Sharded", "with_zero"]

STAGES = (0, 1, 2, 3)
"""0: replicas; 1: updates are sharded; 2: gradients and weights too, with weights gathered from the
forward to the backward; 3: weights are gathered again for the backward."""
SCATTER = "fsdp.reduce_scatter"
"""Target of the collective that reads the whole tensor."""
_GRADIENTS = 2
WAIT = "fsdp.wait"
"""Target of operators that wait until a scatter's buffer is free."""


@dataclass(frozen=True, eq=False, slots=True)
class Sharded:
    """A training step with shards."""

    graph: OpGraph
    value_of: IntArray
    """New index of each value of the unsharded step. Shape (V,)."""


def with_zero(
    graph: OpGraph,
    stage: int,
    replicas: int,
    weight_replicas: IntArray | None = None,
    *,
    reduce_dtype: str | None = None,
) -> Sharded:
    """Shard a training step without updates; the result is what one of `replicas` runs.

    From stage 2 on, parameters without a gradient are sharded too; buffers are not.

    Args:
        graph: the step.
        stage: one of `STAGES`.
        replicas: number of replicas.
        weight_replicas: number of replicas that have each weight; all by default. From stage 2 on,
            weights that not all have, such as experts, must be on a single one. Shape (W,).
        reduce_dtype: from stage 2 on, the dtype in which gradients are scattered, as by FSDP2
            (`MixedPrecisionPolicy`); None for their own.

    Raises:
        SpecError: if the stage does not exist, the graph has no gradients (or for stage 1 a
            gradient is an input), or a weight is on several but not all replicas from stage 2 on.

    """
    if stage not in STAGES:
        raise SpecError(f"zero={stage} does not exist; there are 0, 1, 2 and 3")
    if not len(graph.gradient_values):
        raise SpecError(
            f"zero={stage} shards gradients, but the graph has none; add phase=training"
        )
    same = np.arange(graph.n_values)
    if stage == 0 or replicas == 1:
        return Sharded(graph, same)
    if weight_replicas is None:
        weight_replicas = np.full(len(graph.weight_bytes), replicas)
    sharing = weight_replicas[graph.gradient_weights]
    if stage == 1:
        return _with_gradient_shards(graph, sharing)
    if not np.isin(sharing, (1, replicas)).all():
        raise SpecError(
            f"zero={stage} shards weights over all replicas, but some weights are on a subset of "
            "them"
        )
    frozen = graph.frozen_weights
    frozen = frozen[weight_replicas[frozen] == replicas]
    sharded = np.flatnonzero(sharing == replicas)
    return _rebuild(_Sharding(graph, stage, replicas, sharded, frozen, reduce_dtype=reduce_dtype))


def _with_gradient_shards(graph: OpGraph, sharing: IntArray) -> Sharded:
    """Return `graph` with updates that read shards, as views of the all-reduced gradients."""
    gradients = graph.gradient_values
    count, makers = len(gradients), graph.value_producer[gradients]
    if (makers < 0).any():
        raise SpecError(
            "a gradient is an input of the graph, but zero=1 needs gradients that operators compute"
        )
    # Values are ordered by their producer.
    order = np.argsort(np.concatenate([graph.value_producer, makers]), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    old, new = number[: graph.n_values], number[graph.n_values :]
    base = np.concatenate(
        [np.where(graph.value_base >= 0, old[graph.value_base], -1), old[gradients]]
    )
    sizes = graph.value_bytes[gradients].tolist()
    parts = np.array([share(size, n) for size, n in zip(sizes, sharing.tolist(), strict=True)])
    names = (*graph.value_names, *(f"{graph.value_names[v]}.part" for v in gradients.tolist()))
    value_held = graph.value_held
    if len(value_held):
        value_held = np.concatenate([value_held, np.full(count, -1)])[order]
    parted = replace(
        graph,
        value_names=tuple(names[i] for i in order.tolist()),
        value_producer=np.concatenate([graph.value_producer, makers])[order],
        value_bytes=np.concatenate([graph.value_bytes, parts])[order],
        value_alloc_bytes=np.concatenate([graph.value_alloc_bytes, np.zeros(count, np.int64)])[
            order
        ],
        value_base=base[order],
        value_is_output=np.concatenate([graph.value_is_output, np.ones(count, np.bool_)])[order],
        reads=old[graph.reads],
        gradient_values=new,
        value_held=value_held,
    )
    return Sharded(parted, old)


@dataclass(eq=False, slots=True)
class _Result:
    """A result of an inserted operator."""

    name: str
    size_bytes: int
    alloc_bytes: int
    base: "_Result | None" = None
    stays: bool = False


@dataclass(eq=False, slots=True)
class _Op:
    """An inserted operator; it reads values of the graph (indices) and of inserted operators."""

    name: str
    target: str
    block: Block
    reads: list[int | _Result] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)
    moved_bytes: int = 0
    is_backward: bool = False


class _Sharding:
    """The operators that FSDP2 adds to a graph."""

    def __init__(
        self,
        graph: OpGraph,
        stage: int,
        replicas: int,
        sharded: IntArray,
        frozen: IntArray,
        *,
        reduce_dtype: str | None,
    ) -> None:
        self.graph, self.stage, self.replicas = graph, stage, replicas
        self.reduce_dtype = reduce_dtype
        self.sharded: list[int] = sharded.tolist()
        """Indices of sharded gradients; others are on a single replica."""
        self.before: dict[int, list[_Op]] = {}
        """Operators inserted before each operator of the graph."""
        self.more_reads: dict[int, list[_Result]] = {}
        weights = np.concatenate([graph.gradient_weights[sharded], frozen])
        self.weights_read = weights_read(graph, weights)
        self.shards: dict[int, _Result] = {}
        """Shards by index of the gradient."""
        self.blocks = blocks_of(
            graph, self.weights_read, self.sharded, range(graph.n_ops), frozen.tolist()
        )
        self.whole_forward: dict[str, dict[int, _Result]] = {}
        """Whole weights in the forward, by block."""
        self.whole_backward: dict[str, dict[int, _Result]] = {}
        """Whole weights in the backward, by block."""
        self.block_of_weight = {w: block for block in self.blocks for w in block.weights}
        self._forward()
        self._backward()
        self._scatter()

    def share(self, size_bytes: int) -> int:
        return share(size_bytes, self.replicas)

    def _whole_bytes(self, weights: Sequence[int]) -> int:
        sizes = self.graph.weight_bytes[list(weights)].tolist()
        return sum(map(self.share, sizes)) * self.replicas

    def _insert(self, position: int, op: _Op) -> None:
        self.before.setdefault(position, []).append(op)

    def _gather(self, block: Block, position: int, *, in_backward: bool = False) -> _Op:
        """Insert the all-gather of a block into a buffer."""
        name = f"all_gather{'_again' if in_backward else ''}.{block.name or 'root'}"
        whole = self._whole_bytes(block.weights)
        op = _Op(
            name, GATHER, block, results=[_Result(name, whole, whole)], is_backward=in_backward
        )
        self._insert(position, op)
        return op

    def _copy_out(
        self, position: int, gather: _Op, kept: Sequence[_Result] = ()
    ) -> dict[int, _Result]:
        """Insert the copy of a block's weights out of the buffer; `kept` live until it ends."""
        block, graph = gather.block, self.graph
        name = gather.name.replace("all_gather", "copy_out")
        sizes = {w: int(graph.weight_bytes[w]) for w in block.weights}
        whole = {w: _Result(f"{name}.{graph.weight_names[w]}", sizes[w], sizes[w]) for w in sizes}
        op = _Op(name, COPY, block, [gather.results[0], *kept], list(whole.values()))
        op.is_backward, op.moved_bytes = gather.is_backward, 2 * self._whole_bytes(block.weights)
        self._insert(position, op)
        return whole

    def _keep_until(self, position: int, whole: Mapping[int, _Result]) -> None:
        self.more_reads.setdefault(position, []).extend(whole.values())

    def _forward(self) -> None:
        """Gather each block for its forward.

        A buffer lives until the next one is copied out, the last one to the end of the forward.
        """
        previous: _Op | None = None
        for block in self.blocks:
            gather = self._gather(block, block.first)
            previous_buffer = [] if previous is None else previous.results
            whole = self._copy_out(block.first, gather, previous_buffer)
            previous = gather
            self.whole_forward[block.name] = self.whole_backward[block.name] = whole
            stays_gathered = self.stage == _GRADIENTS or not block.name
            end = block.last_backward if block.has_backward else self.graph.n_ops - 1
            self._keep_until(end if stays_gathered else block.last, whole)
        if previous is not None:
            self._keep_until(self.graph.first_backward - 1, {0: previous.results[0]})

    def _backward(self) -> None:
        """Gather freed blocks again, each with the backward of the block that follows it.

        FSDP2 does so whether or not a block has a backward; without one, the buffer stays.
        """
        if self.stage == _GRADIENTS:
            return
        position: int | None = self.graph.first_backward  # the root is still gathered
        for block in reversed([block for block in self.blocks if block.name]):
            own = block.first_backward if block.has_backward else None
            if position is None:  # nothing follows in the backward
                position = own
            elif own is not None:  # a later block may use its weights, too
                position = min(position, own)
            if position is not None:
                gather = self._gather(block, position, in_backward=True)
                if own is None:
                    self._keep_until(self.graph.n_ops - 1, {0: gather.results[0]})
                else:
                    whole = self.whole_backward[block.name] = self._copy_out(own, gather)
                    self._keep_until(block.last_backward, whole)
            position = own

    def _scatter(self) -> None:
        """Scatter the gradients of each block after its backward, the root's last.

        A buffer lives until the next one is needed.
        """
        graph, buffer = self.graph, None
        trained = [block for block in self.blocks if block.trained]
        for block in sorted(trained, key=lambda b: (b.last_backward, not b.name)):
            position, name = block.last_backward + 1, block.name or "root"
            if buffer is not None:
                self._insert(position, _Op(f"wait.{name}", WAIT, block, [buffer], [], 0, True))
            whole = self._whole_bytes(block.trained)
            reduced = reduced_bytes(graph, block.gradients, self.reduce_dtype, self.replicas)
            gradient_values = [int(graph.gradient_values[g]) for g in block.gradients]
            buffer = _Result(f"copy_in.{name}", reduced, reduced)
            moved = whole + reduced
            copy = _Op(buffer.name, COPY, block, list(gradient_values), [buffer], moved, True)
            self._insert(position, copy)
            part, reduced_part = self.share(whole), self.share(reduced)
            result = _Result(f"reduce_scatter.{name}", part, part, stays=True)
            scatter = _Op(result.name, SCATTER, block, [buffer], [result], 0, True)
            if reduced_part != part:  # cast to the dtype of the weights
                reduced_name = f"{result.name}.{self.reduce_dtype}"
                scatter.results.append(_Result(reduced_name, reduced_part, reduced_part))
            for g, value in zip(block.gradients, gradient_values, strict=True):
                size = self.share(int(graph.value_bytes[value]))
                shard = _Result(f"{graph.value_names[value]}.part", size, 0, result, True)
                self.shards[g] = shard
                scatter.results.append(shard)
            self._insert(position, scatter)


class _Columns:
    """Columns of the rebuilt graph, operator by operator."""

    def __init__(self, sharding: _Sharding) -> None:
        self.sharding, self.graph = sharding, sharding.graph
        self.first_backward = self.graph.first_backward
        self.ops: list[int | _Op] = []
        self.values: list[int | _Result] = list(
            range(int(np.searchsorted(self.graph.value_producer, 0)))
        )
        self.producers = [-1] * len(self.values)
        self.number_of: dict[object, int] = {}
        self.gather_of: dict[str, int] = {}
        starts = np.searchsorted(self.graph.value_producer, np.arange(self.graph.n_ops + 1))
        for op in range(self.graph.n_ops + 1):
            for inserted in sharding.before.get(op, ()):
                self._add(inserted, list(inserted.results))
            if op < self.graph.n_ops:
                self._add(op, list(range(starts[op], starts[op + 1])))
        self.value_of = {value: number for number, value in enumerate(self.values)}

    def _add(self, op: int | _Op, results: Sequence[int | _Result]) -> None:
        number = len(self.ops)
        self.ops.append(op)
        self.number_of[op] = number
        if isinstance(op, _Op) and op.target == GATHER and not op.is_backward:
            self.gather_of[op.block.name] = number
        self.values.extend(results)
        self.producers.extend([number] * len(results))

    def of_ops(self, inserted: Callable[[_Op], Any], present: Sequence[Any]) -> list[Any]:
        """Return an entry for each operator: `inserted` of those added, else that of `present`."""
        return [inserted(op) if isinstance(op, _Op) else present[op] for op in self.ops]

    def of_values(self, inserted: Callable[[_Result], Any], present: Sequence[Any]) -> list[Any]:
        """Return the same for each value."""
        return [inserted(v) if isinstance(v, _Result) else present[v] for v in self.values]

    def numbers(self, values: Iterable[int | _Result]) -> list[int]:
        return list(dict.fromkeys(self.value_of[value] for value in values))

    def reads(self, op: int | _Op) -> list[int]:
        if isinstance(op, _Op):
            return self.numbers(op.reads)
        sharding = self.sharding
        values: list[int | _Result] = list(self.graph.reads_of(op).tolist())
        forward = op < self.first_backward
        whole = sharding.whole_forward if forward else sharding.whole_backward
        for weight in sharding.weights_read[op]:
            block = sharding.block_of_weight[weight]
            values.append(whole[block.name][weight])
        return self.numbers([*values, *sharding.more_reads.get(op, ())])

    def uses(self, op: int | _Op) -> list[int]:
        if isinstance(op, _Op):
            return list(op.block.weights) if op.target == GATHER else []
        whole = self.sharding.block_of_weight
        return [w for w in self.graph.uses_of(op).tolist() if w not in whole]

    def forward_of(self, number: int, op: int | _Op) -> int:
        if isinstance(op, _Op):
            return self.gather_of[op.block.name] if op.is_backward else number
        return self.number_of[int(self.graph.forward_of[op])]


def _dtype(sharding: _Sharding, block: Block) -> str:
    """Return the dtype of the gradients of `block`; of what its weights yield if there are none.

    The first operator of a block may be integer arithmetic, so its dtype is not used.
    """
    graph = sharding.graph
    if block.gradients:
        gradient = graph.gradient_values[block.gradients[0]]
        return graph.dtypes[int(graph.value_producer[gradient])]
    weights = set(block.frozen)
    readers = (op for op, read in enumerate(sharding.weights_read) if weights.intersection(read))
    return graph.dtypes[next(readers)]


def _rebuild(sharding: _Sharding) -> Sharded:
    """Return the graph with all operators inserted."""
    graph, columns = sharding.graph, _Columns(sharding)
    sizes, value_held, attention = graph.weight_bytes.copy(), graph.value_held, graph.attention
    for weight in sharding.block_of_weight:
        sizes[weight] = sharding.share(int(sizes[weight]))
    if len(value_held):
        last = [columns.number_of[op] if op >= 0 else -1 for op in value_held.tolist()]
        value_held = np.array(columns.of_values(lambda _: -1, last), dtype=np.int64)
    if len(attention):
        attention = attention.copy()
        attention[:, 0] = [columns.number_of[op] for op in attention[:, 0].tolist()]
    shards = [sharding.shards.get(g, v) for g, v in enumerate(graph.gradient_values.tolist())]
    sharded = replace(
        graph,
        **_op_columns(columns),
        **_value_columns(columns),
        weight_bytes=sizes,
        unread_weight_bytes=np.array(
            [sharding.share(size) for size in graph.unread_weight_bytes.tolist()], dtype=np.int64
        ),
        gradient_values=np.array(columns.numbers(shards), dtype=np.int64),
        attention=attention,
        value_held=value_held,
    )
    value_of = np.array([columns.value_of[v] for v in range(graph.n_values)], dtype=np.int64)
    return Sharded(sharded, value_of)


def _op_columns(columns: _Columns) -> dict[str, Any]:
    """Return the fields of the rebuilt graph that have an entry for each operator."""
    sharding, graph, ops = columns.sharding, columns.graph, columns.ops
    first_op_of_block = {block.name: block.first for block in sharding.blocks}
    dtype_of = {block.name: _dtype(sharding, block) for block in sharding.blocks}
    groups = columns.of_ops(
        lambda op: int(graph.group[first_op_of_block[op.block.name]]), graph.group.tolist()
    )
    first: dict[int, int] = {}
    read_start, reads = csr([columns.reads(op) for op in ops])
    use_start, uses = csr([columns.uses(op) for op in ops])
    flops = columns.of_ops(lambda _: 0, graph.flops.tolist())
    moved_bytes = columns.of_ops(lambda op: op.moved_bytes, graph.moved_bytes.tolist())
    return {
        "names": tuple(columns.of_ops(lambda op: op.name, graph.names)),
        "modules": tuple(columns.of_ops(lambda op: op.block.name, graph.modules)),
        "targets": tuple(columns.of_ops(lambda op: op.target, graph.targets)),
        "dtypes": tuple(columns.of_ops(lambda op: dtype_of[op.block.name], graph.dtypes)),
        "flops": np.array(flops, dtype=np.int64),
        "moved_bytes": np.array(moved_bytes),
        "group": np.array([first.setdefault(key, number) for number, key in enumerate(groups)]),
        "read_start": read_start,
        "reads": reads,
        "use_start": use_start,
        "uses": uses,
        "forward_of": np.array([columns.forward_of(n, op) for n, op in enumerate(ops)]),
    }


def _value_columns(columns: _Columns) -> dict[str, Any]:
    """Return the fields of the rebuilt graph that have an entry for each value."""
    graph = columns.graph
    scattered = {int(v) for v in graph.gradient_values[columns.sharding.sharded].tolist()}
    is_output = [
        v not in scattered and bool(graph.value_is_output[v]) for v in range(graph.n_values)
    ]
    alloc_bytes = columns.of_values(lambda v: v.alloc_bytes, graph.value_alloc_bytes.tolist())
    bases = columns.of_values(
        lambda v: v.base if v.base is not None else -1, graph.value_base.tolist()
    )
    base_numbers = [-1 if base == -1 else columns.value_of[base] for base in bases]
    return {
        "value_names": tuple(columns.of_values(lambda v: v.name, graph.value_names)),
        "value_producer": np.array(columns.producers, dtype=np.int64),
        "value_bytes": np.array(
            columns.of_values(lambda v: v.size_bytes, graph.value_bytes.tolist())
        ),
        "value_alloc_bytes": np.array(alloc_bytes),
        "value_base": np.array(base_numbers, dtype=np.int64),
        "value_is_output": np.array(
            columns.of_values(lambda v: v.stays, is_output), dtype=np.bool_
        ),
    }
