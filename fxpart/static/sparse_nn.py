"""Spread embeddings over equal devices, and replicate the rest on each of them.

The rules are those of ``Partitioner.sparse_nn_partition`` in
``torch.fx.experimental.accelerator_partitioner``: cut at every border between embedding and other
operators and where a device is full, then combine the partitions of each kind, the smallest with
the largest that still fits beside it.
"""

import numpy as np

from fxpart.compiled import compiled
from fxpart.errors import InfeasibleError
from fxpart.graph import IntArray
from fxpart.static.arrays import BoolArray, GraphArrays, arrays_of
from fxpart.static.combine import combine
from fxpart.static.filling import added_bytes, nothing_filled, put
from fxpart.static.graph import StaticPlan, StaticProblem
from fxpart.static.memory import used_bytes
from fxpart.static.refusals import too_large_alone
from fxpart.static.size_based import alone_bytes

__all__ = ["sparse_nn"]


@compiled
def _cut(
    graph: GraphArrays, alone: IntArray, is_embedding: BoolArray, available: int
) -> tuple[IntArray, BoolArray]:
    """Return each operator's run, and whether each run is of embeddings.

    A run ends at a border between the kinds, unless it has taken no memory yet, and where the next
    operator would exceed `available`.
    """
    n = alone.shape[0]
    filling, kinds = nothing_filled(graph), np.zeros(n, dtype=np.bool_)
    current, used, kind = 0, np.int64(0), False
    for op in range(n):
        if is_embedding[op] != kind:
            if used != 0:
                current, used = current + 1, np.int64(0)
            kind = is_embedding[op]
        added = added_bytes(graph, filling, alone, op, current)
        if used + added > available:
            current, used, added = current + 1, np.int64(0), alone[op]
        put(graph, filling, op, current)
        kinds[current] = kind
        used += added
    return filling.part, kinds[: current + 1]


def _check(problem: StaticProblem, alone: IntArray, is_embedding: BoolArray) -> int:
    """Return the memory of each device, after checking what the mode asks for."""
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
    """Return the devices of each partition: one for each of embeddings, all those for the rest."""
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
    """Return the plan with a device for each partition of embeddings, the rest on all of those.

    Args:
        problem: devices with the same memory, and the graph.
        is_embedding: whether each operator is an embedding. Shape (n,).

    Raises:
        InfeasibleError: when devices differ in memory, no operator is an embedding, one operator
            is too large, there are fewer devices than partitions of embeddings, or the rest does
            not fit beside one of those.

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
