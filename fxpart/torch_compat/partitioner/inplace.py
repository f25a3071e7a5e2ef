"""`ties_of`: find operators that must share a partition because one of them writes in place.

Partitions run in the order of their data dependences. These do not order a reader of a tensor
against an operator that writes into it, and a write into a received copy does not reach other
devices. So the following operators stay in one partition, where they run in graph order:

- if a tensor is read or returned after a write under an older name (the tensor itself, or a view
  not derived from the result of the write): all operators that make the tensor, its views and the
  writes, and those readers;
- a reader before a write that does not depend on it, and the write.

An operator that writes into its operand is not tied if only its result is read afterwards, since
it may as well write into a received copy.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node

from fxpart.execution.split.effects import (
    Effects,
    SharedMemory,
    Value,
    effects_of,
    is_question,
    storages,
)
from fxpart.torch_compat.partitioner.lowering import Lowered

__all__ = ["Tie", "ties_of"]


@dataclass(frozen=True, slots=True)
class Tie:
    """Operators that must share a partition."""

    ops: tuple[int, ...]
    """Their indices, in graph order."""
    tensor: str
    """Name of the tensor written into."""


@dataclass(slots=True)
class _Storage:
    """A tensor written in place, with all its views, during the walk over the graph."""

    version: dict[Value, int] = field(default_factory=dict)
    """Number of writes certainly reflected by each value."""
    makers: list[int] = field(default_factory=list)
    """Operators that return it or a view of it, or write into it."""
    stale_readers: list[int] = field(default_factory=list)
    """Operators that read an older value after a write."""
    stale_output: bool = False
    writes: int = 0
    readers: list[int] = field(default_factory=list)
    """Operators that read it since the last write."""
    tensor: str = ""


def _weights(root: GraphModule, node: Node) -> list[Value]:
    """Return the storages of the weights called or fetched by a node."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return storages("weight", [*module.parameters(), *module.buffers()])
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(root)
        weights = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value
        return storages("weight", weights)
    return []


def _shared_memory(
    lowered: Lowered, effects: Sequence[Effects], weights: Sequence[Sequence[Value]]
) -> SharedMemory:
    """Return the nodes and weights that may share memory; `weights` are those of the sources."""
    memory = SharedMemory()
    for node, effect in zip(lowered.ops, effects, strict=True):
        memory.enter(node, effect.shared)
    for node in (*lowered.sources, *lowered.ops):
        memory.hold(node, "traced", node.meta.get("val"))
    for node, node_weights in zip(lowered.sources, weights, strict=True):
        for storage in node_weights:
            memory.join(storage, node)
    return memory


def _waits_for(lowered: Lowered, write: int, earlier: Sequence[int]) -> set[int]:
    """Return the operators of `earlier` that `write` depends on, directly or indirectly."""
    graph, first = lowered.graph, min(earlier)
    visited, stack = {write}, [write]
    while stack:
        op = stack.pop()
        for read in graph.reads[graph.read_start[op] : graph.read_start[op + 1]].tolist():
            if read >= first and read not in visited:
                visited.add(read)
                stack.append(read)
    return visited.intersection(earlier)


def _visit(  # noqa: PLR0917 - one step of the walk below
    lowered: Lowered,
    op: int,
    storage: _Storage,
    read: Sequence[Value],
    writes: Sequence[Value],
    returned: bool,
    ties: list[Tie],
) -> None:
    """Process one operator that reads, writes or returns `storage`."""
    node = lowered.ops[op]
    version = min((storage.version.get(value, 0) for value in read), default=storage.writes)
    if read and version < storage.writes and not is_question(node):
        storage.stale_readers.append(op)
    if writes:
        first = writes[0]
        storage.tensor = storage.tensor or (first.name if isinstance(first, Node) else node.name)
        ordered = storage.readers and _waits_for(lowered, op, storage.readers)
        ties.extend(
            Tie((reader, op), storage.tensor) for reader in storage.readers if reader not in ordered
        )
        storage.writes += 1
        storage.readers, version = [], storage.writes
    elif read and not is_question(node):
        storage.readers.append(op)
    if returned or writes:
        storage.version[node] = version
        storage.makers.append(op)


def ties_of(module: GraphModule, lowered: Lowered) -> list[Tie]:
    """Return the operators of a graph that in-place writes force to stay together. O(graph).

    Ties exist only if some reader needs them. A result that is not certainly a new tensor counts as
    a view of all operands.
    """
    effects = [effects_of(module, node) for node in lowered.ops]
    if not any(effect.written or effect.writes_weights for effect in effects):
        return []
    memory = _shared_memory(lowered, effects, [_weights(module, node) for node in lowered.sources])
    weights = [_weights(module, node) for node in lowered.ops]
    written: list[list[Value]] = [
        [*effect.written, *(weights[op] if effect.writes_weights else ())]
        for op, effect in enumerate(effects)
    ]
    ties = list[Tie]()
    # Written tensors, by their root in `memory`.
    storages = {memory.root(value): _Storage() for values in written for value in values}
    for op, node in enumerate(lowered.ops):
        read: dict[Value, list[Value]] = {}
        for value in (*node.all_input_nodes, *weights[op]):
            read.setdefault(memory.root(value), []).append(value)
        result = memory.root(node)
        for root in dict.fromkeys((*read, result)):
            if root in storages:
                writes = [value for value in written[op] if memory.root(value) == root]
                row = read.get(root, [])
                _visit(lowered, op, storages[root], row, writes, root == result, ties)
    outputs = module.graph.find_nodes(op="output")
    for node in (result for output in outputs for result in output.all_input_nodes):
        storage = storages.get(memory.root(node))
        if storage is not None and storage.version.get(node, 0) < storage.writes:
            storage.stale_output = True
    for storage in storages.values():
        if storage.stale_readers or storage.stale_output:
            together = sorted({*storage.makers, *storage.stale_readers})
            ties.append(Tie(tuple(together), storage.tensor))
    return [tie for tie in ties if len(tie.ops) > 1]
