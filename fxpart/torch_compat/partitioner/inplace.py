"""Which operators must stay together because one of them writes into a tensor that it was given.

Partitions run in the order of what they read from each other. That says nothing about a reader of
a tensor that another operator writes into, and nothing crosses from one device to another when a
received copy is written into. So these stay in one partition, where they run in graph order:

- where a tensor is read after the write under an older name (the tensor itself, or a view of it
  that is not made from the result of the write), or handed to the caller so: all that make the
  tensor, its views and the writes, and those readers;
- a reader before the write that the write does not wait for, and the write.

An operator that writes into what it was given, and whose result alone is read from there on, is
free: a received copy does as well.
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
    """Name of the tensor that is written into."""


@dataclass(slots=True)
class _Storage:
    """One tensor that is written into, with all its views, as the walk over the graph sees it."""

    version: dict[Value, int] = field(default_factory=dict)
    """How many of the writes each value has seen for sure."""
    makers: list[int] = field(default_factory=list)
    """Operators that return it, a view of it, or write into it."""
    stale: list[int] = field(default_factory=list)
    """Operators that read an older value after a write."""
    stale_output: bool = False
    writes: int = 0
    since: list[int] = field(default_factory=list)
    """Operators that read it since the last write."""
    tensor: str = ""


def _weights(root: GraphModule, node: Node) -> list[Value]:
    """Return the storages of the weights of what a node calls or fetches."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return storages("weight", [*module.parameters(), *module.buffers()])
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(root)
        weights = [*held.parameters(), *held.buffers()] if isinstance(held, nn.Module) else held
        return storages("weight", weights)
    return []


def _shared_names(
    lowered: Lowered, effects: Sequence[Effects], weights: Sequence[Sequence[Value]]
) -> SharedMemory:
    """Return which nodes and weights may share memory."""
    names = SharedMemory()
    for node, effect in zip(lowered.ops, effects, strict=True):
        names.enter(node, effect.shared)
    for node in (*lowered.sources, *lowered.ops):
        names.hold(node, "traced", node.meta.get("val"))
    for node, held in zip(lowered.sources, weights, strict=True):
        for storage in held:
            names.join(storage, node)
    return names


def _waits_for(lowered: Lowered, write: int, earlier: Sequence[int]) -> set[int]:
    """Return those of `earlier` that `write` reads from, in one step or several."""
    graph, least = lowered.graph, min(earlier)
    seen, stack = {write}, [write]
    while stack:
        op = stack.pop()
        for read in graph.reads[graph.read_start[op] : graph.read_start[op + 1]].tolist():
            if read >= least and read not in seen:
                seen.add(read)
                stack.append(read)
    return seen.intersection(earlier)


def _written(
    names: SharedMemory, effects: Sequence[Effects], weights: Sequence[Sequence[Value]]
) -> dict[Value, _Storage]:
    """Return what some operator writes into, by the value that stands for it."""
    into: list[Value] = []
    for effect, held in zip(effects, weights, strict=True):
        into += [*effect.written, *(held if effect.writes_weights else ())]
    return {names.root(value): _Storage() for value in into}


def _visit(  # noqa: PLR0917 - one step of the walk below
    lowered: Lowered,
    op: int,
    storage: _Storage,
    read: Sequence[Value],
    writes: Sequence[Value],
    returned: bool,
    ties: list[Tie],
) -> None:
    """Enter one operator that reads, writes or returns `storage`."""
    node = lowered.ops[op]
    seen = min((storage.version.get(value, 0) for value in read), default=storage.writes)
    if read and seen < storage.writes and not is_question(node):
        storage.stale.append(op)
    if writes:
        first = writes[0]
        storage.tensor = storage.tensor or (first.name if isinstance(first, Node) else node.name)
        waiting = storage.since and _waits_for(lowered, op, storage.since)
        ties.extend(
            Tie((early, op), storage.tensor) for early in storage.since if early not in waiting
        )
        storage.writes += 1
        storage.since, seen = [], storage.writes
    elif read and not is_question(node):
        storage.since.append(op)
    if returned or writes:
        storage.version[node] = seen
        storage.makers.append(op)


def _outputs(module: GraphModule) -> list[Node]:
    """Return the nodes that the graph returns."""
    return [x for n in module.graph.nodes if n.op == "output" for x in n.all_input_nodes]


def ties_of(module: GraphModule, lowered: Lowered) -> list[Tie]:
    """Return the operators of a graph that must stay together, for writes in place. O(graph).

    Only where some reader needs it: a graph without such a write has none. What is not known to
    return a tensor of its own counts as a view of what it reads.
    """
    effects = [effects_of(module, node) for node in lowered.ops]
    if not any(effect.written or effect.writes_weights for effect in effects):
        return []
    fetched = [_weights(module, node) for node in lowered.sources]
    held = [_weights(module, node) for node in lowered.ops]
    names, ties = _shared_names(lowered, effects, fetched), list[Tie]()
    storages = _written(names, effects, held)
    for op, (node, effect) in enumerate(zip(lowered.ops, effects, strict=True)):
        written: list[Value] = [*effect.written, *(held[op] if effect.writes_weights else ())]
        read: dict[Value, list[Value]] = {}
        for value in (*node.all_input_nodes, *held[op]):
            read.setdefault(names.root(value), []).append(value)
        own = names.root(node)
        for root in dict.fromkeys((*read, own)):
            if root in storages:
                into = [value for value in written if names.root(value) == root]
                row = read.get(root, [])
                _visit(lowered, op, storages[root], row, into, root == own, ties)
    for node in _outputs(module):
        storage = storages.get(names.root(node))
        if storage is not None and storage.version.get(node, 0) < storage.writes:
            storage.stale_output = True
    for storage in storages.values():
        if storage.stale or storage.stale_output:
            together = sorted({*storage.makers, *storage.stale})
            ties.append(Tie(tuple(together), storage.tensor))
    return [tie for tie in ties if len(tie.ops) > 1]
