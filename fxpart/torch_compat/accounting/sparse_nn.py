"""`sparse_nn`: spread embeddings over equal devices, and replicate the rest on each of them.

The rules are those of ``Partitioner.sparse_nn_partition`` in
``torch.fx.experimental.accelerator_partitioner``: cut the graph into runs at every border between
embeddings and other operators and wherever a device is full, then combine the runs of each kind,
the smallest with the largest it fits beside.
"""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.errors import InfeasibleError
from fxpart.support.compiled import compiled, inlined
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.problem import (
    BoolArray,
    GraphArrays,
    StaticGraph,
    StaticPlan,
    StaticProblem,
    arrays_of,
    distinct_rows,
)
from fxpart.torch_compat.accounting.size_based import (
    added_bytes,
    alone_bytes,
    nothing_filled,
    put,
    too_large_alone,
)

__all__ = ["combine", "sparse_nn"]


# Combine runs into as few partitions as memory and levels allow.
#
# Two partitions are combined only when their levels, the longest paths from a root, differ by at
# most one. So no cycle can arise: a path around them through a third partition needs two levels.


class _Tables(NamedTuple):
    """Reads between R runs, and their m sources, as CSR rows."""

    after_start: IntArray
    after: IntArray
    """Runs that read from each run."""
    beside_start: IntArray
    beside: IntArray
    """Runs that read from each run, or that it reads from."""
    beside_bytes: IntArray
    """Bytes passed between the two, counted once per reading operator."""
    source_start: IntArray
    sources: IntArray
    """Sources read by each run, each once."""
    user_start: IntArray
    users: IntArray
    """Runs that read each source, each once."""
    source_bytes: IntArray


def _tables(graph: StaticGraph, run_of: IntArray, runs: int) -> _Tables:
    """Return the tables of the runs of `graph`."""
    reader = run_of[np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))]
    maker = run_of[graph.reads]
    crossing = reader != maker
    reader, maker = reader[crossing], maker[crossing]
    ends = np.concatenate([maker * runs + reader, reader * runs + maker])
    between, index = np.unique(ends, return_inverse=True)
    passed = np.zeros(len(between), dtype=np.int64)
    np.add.at(passed, index, np.tile(graph.output_bytes[graph.reads[crossing]], 2))
    user = run_of[np.repeat(np.arange(graph.n_ops), np.diff(graph.source_start))]
    return _Tables(
        *distinct_rows(maker, reader, runs),
        np.searchsorted(between, np.arange(runs + 1) * runs).astype(np.int64),
        between % runs,
        passed,
        *distinct_rows(user, graph.sources, runs),
        *distinct_rows(graph.sources, user, len(graph.source_bytes)),
        graph.source_bytes,
    )


@inlined
def _levels(tables: _Tables, owner: IntArray, following: IntArray) -> IntArray:
    """Return the longest path from a root to each partition, at its owner's number."""
    runs = owner.shape[0]
    waits, level = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=np.int64)
    for run in range(runs):
        for i in range(tables.after_start[run], tables.after_start[run + 1]):
            if owner[tables.after[i]] != owner[run]:
                waits[owner[tables.after[i]]] += 1
    queue = np.empty(runs, dtype=np.int64)
    start, end = 0, 0
    for run in range(runs):
        if owner[run] == run and waits[run] == 0:
            queue[end] = run
            end += 1
    while start < end:
        part = queue[start]
        start += 1
        member = part
        while member >= 0:
            for i in range(tables.after_start[member], tables.after_start[member + 1]):
                reader = owner[tables.after[i]]
                if reader != part:
                    level[reader] = max(level[reader], level[part] + 1)
                    waits[reader] -= 1
                    if waits[reader] == 0:
                        queue[end] = reader
                        end += 1
            member = following[member]
    return level


@inlined
def _shared(tables: _Tables, owner: IntArray, following: IntArray, part: int) -> IntArray:
    """Return the bytes saved by combining `part` with each other partition.

    These are values produced by one and read by the other, and sources read by both.
    """
    shared = np.zeros(owner.shape[0], dtype=np.int64)
    counted_sources = np.zeros(tables.source_bytes.shape[0], dtype=np.bool_)
    counted = np.full(owner.shape[0], -1, dtype=np.int64)
    member = part
    while member >= 0:
        for i in range(tables.beside_start[member], tables.beside_start[member + 1]):
            shared[owner[tables.beside[i]]] += tables.beside_bytes[i]
        for i in range(tables.source_start[member], tables.source_start[member + 1]):
            source = tables.sources[i]
            if counted_sources[source]:
                continue
            counted_sources[source] = True
            for j in range(tables.user_start[source], tables.user_start[source + 1]):
                reader = owner[tables.users[j]]
                if counted[reader] != source:
                    counted[reader] = source
                    shared[reader] += tables.source_bytes[source]
        member = following[member]
    return shared


@compiled
def _extreme(open_: BoolArray, used: IntArray, age: IntArray, largest: bool) -> int:
    """Return the smallest (oldest first) or largest (youngest first) open partition, or -1."""
    extreme = -1
    for part in range(open_.shape[0]):
        if open_[part] and (
            extreme < 0 or ((used[part], age[part]) > (used[extreme], age[extreme])) == largest
        ):
            extreme = part
    return extreme


@compiled
def _combine(
    tables: _Tables, kinds: BoolArray, used: IntArray, available: int
) -> tuple[IntArray, IntArray]:
    """Return the owner of each run, and the age of each partition at its owner's number."""
    runs = kinds.shape[0]
    owner, age, last = np.arange(runs), np.arange(runs), np.arange(runs)
    following = np.full(runs, -1, dtype=np.int64)
    born = runs
    for kind in (False, True):
        open_ = kinds == kind
        while True:
            smallest = _extreme(open_, used, age, False)
            if smallest < 0:
                break
            level = _levels(tables, owner, following)
            shared = _shared(tables, owner, following, smallest)
            fits = open_ & (used + used[smallest] - shared <= available)
            fits &= np.abs(level - level[smallest]) <= 1
            fits[smallest] = False
            best = _extreme(fits, used, age, True)
            if best < 0:
                break
            used[best] += used[smallest] - shared[best]
            age[best] = born
            born += 1
            open_[smallest] = False
            following[last[best]] = smallest
            last[best] = last[smallest]
            member = smallest
            while member >= 0:
                owner[member] = best
                member = following[member]
    return owner, age


def combine(
    graph: StaticGraph, run_of: IntArray, kinds: BoolArray, used: IntArray, available: int
) -> IntArray:
    """Return the partition of each run, numbered by age. Shape (R,).

    As in torch's ``sparse_nn``: first the runs of kind False, then those of kind True; the smallest
    partition joins the largest it fits beside, until none fits.

    Args:
        graph: the operators.
        run_of: run of each operator, non-decreasing from 0. Shape (n,).
        kinds: kind of each run; only runs of one kind are combined. Shape (R,).
        used: bytes of each run as its own partition. Shape (R,).
        available: maximal bytes of a partition.

    """
    tables = _tables(graph, run_of, len(kinds))
    owner, age = _combine(tables, kinds, used.copy(), available)
    owners = np.unique(owner)
    number = np.empty(len(kinds), dtype=np.int64)
    number[owners[np.argsort(age[owners])]] = np.arange(len(owners))
    return number[owner]


# The mode.


@compiled
def _cut(
    graph: GraphArrays, alone: IntArray, is_embedding: BoolArray, available: int
) -> tuple[IntArray, BoolArray]:
    """Return each operator's run, and whether each run consists of embeddings.

    A run ends at a border between the kinds, unless it uses no memory yet, and where the next
    operator would exceed `available`.
    """
    n = alone.shape[0]
    filling, kinds = nothing_filled(graph), np.zeros(n, dtype=np.bool_)
    current, used_bytes, kind = 0, np.int64(0), False
    for op in range(n):
        if is_embedding[op] != kind:
            if used_bytes != 0:
                current, used_bytes = current + 1, np.int64(0)
            kind = is_embedding[op]
        added = added_bytes(graph, filling, alone, op, current)
        if used_bytes + added > available:
            current, used_bytes, added = current + 1, np.int64(0), alone[op]
        put(graph, filling, op, current)
        kinds[current] = kind
        used_bytes += added
    return filling.part, kinds[: current + 1]


def _check(problem: StaticProblem, alone: IntArray, is_embedding: BoolArray) -> int:
    """Return the memory per device, after checking the preconditions of the mode."""
    memory = problem.memory_bytes
    if (memory != memory[0]).any():
        raise InfeasibleError(
            "sparse_nn needs devices with the same memory, as it replicates operators on all:"
            f" there are {memory.min()} to {memory.max()} bytes; use mode size_based",
            available_bytes=int(memory.min()),
        )
    if not is_embedding.any():
        count = problem.graph.n_ops
        raise InfeasibleError(
            f"sparse_nn gives a device to each group of embeddings, but none of the {count}"
            " operators is an embedding; use mode size_based"
        )
    refused = too_large_alone(problem, alone)
    if refused is not None:
        raise refused
    return int(memory[0])


def _devices(
    used: IntArray, kinds: BoolArray, devices: int, available: int
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each partition: one for embeddings, all of those for the rest."""
    embeddings = np.flatnonzero(kinds)
    if len(embeddings) > devices:
        raise InfeasibleError(
            f"sparse_nn needs {len(embeddings)} devices of {available} bytes for the embeddings,"
            f" but only {devices} are given; give more or larger devices",
            needed_bytes=int(used[embeddings].sum()),
            available_bytes=devices * available,
        )
    dense = int(used[~kinds].sum())
    largest = int(embeddings[used[embeddings].argmax()])
    if dense + used[largest] > available:
        raise InfeasibleError(
            f"sparse_nn puts all other operators ({dense} bytes) beside each partition of"
            f" embeddings: with partition {largest} ({used[largest]} bytes) they need"
            f" {dense + used[largest]} bytes, each device has {available}; give larger devices,"
            " or use mode size_based",
            needed_bytes=int(dense + used[largest]),
            available_bytes=available,
        )
    everywhere = tuple(range(len(embeddings)))
    position = np.cumsum(kinds) - 1
    return tuple((int(position[p]),) if kinds[p] else everywhere for p in range(len(kinds)))


def sparse_nn(problem: StaticProblem, is_embedding: BoolArray) -> StaticPlan:
    """Return the plan with one device per partition of embeddings, and the rest on all of them.

    Args:
        problem: devices with the same memory, and the graph.
        is_embedding: whether each operator is an embedding. Shape (n,).

    Raises:
        InfeasibleError: if devices differ in memory, no operator is an embedding, an operator is
            too large, there are fewer devices than partitions of embeddings, or the rest does not
            fit beside one of those.

    """
    graph = problem.graph
    alone = alone_bytes(graph)
    available = _check(problem, alone, is_embedding)
    run_of, kinds = _cut(arrays_of(graph), alone, is_embedding, available)
    used = used_bytes(graph, run_of, len(kinds))
    partition_of_run = combine(graph, run_of, kinds, used, available)
    partition_of = partition_of_run[run_of]
    kind_of = np.zeros(int(partition_of.max()) + 1, dtype=np.bool_)
    kind_of[partition_of_run] = kinds
    used = used_bytes(graph, partition_of, len(kind_of))
    return StaticPlan(partition_of, _devices(used, kind_of, len(problem.memory_bytes), available))
