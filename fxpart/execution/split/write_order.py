"""Which partitions must run before others because one of them writes into a tensor in place.

A node that reads a tensor under an older name sees the elements from before or after a write; no
data dependence tells which, only the graph's order. So partitions that touch a tensor which is
written into keep the graph's order around each write.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from fxpart.execution.split.effects import SharedMemory, effects_of, is_question
from fxpart.execution.split.graph_module import fetched

__all__ = ["WriteEdges", "write_edges", "writes_in_place"]

_SWITCHES = frozenset({"inplace", "out", "max_norm"})
"""Arguments with which a function writes into another."""

WriteEdges = dict[tuple[int, int], str]
"""Pairs of partitions of which the first must run before the second, and the tensor's name."""


def write_edges(
    module: GraphModule, ops: Sequence[Node], part_of: Mapping[Node, int]
) -> WriteEdges:
    """Return the pairs of partitions that writes in place order. O(graph).

    Writes and aliases are those of `effects_of`; asking for a size is no read. Empty for a graph
    without writes.

    Args:
        module: to be cut.
        ops: its operators that are in partitions, in graph order.
        part_of: partition of each of them.

    """
    if not writes_in_place(module, ops):
        return {}
    effects = [effects_of(module, node) for node in ops]
    memory = SharedMemory()
    for node in module.graph.find_nodes(op="get_attr"):
        memory.hold(node, "weight", fetched(module, str(node.target)))
    for node, effect in zip(ops, effects, strict=True):
        memory.enter(node, effect.shared)
    tensors = {memory.root(x): _Tensor(x.name) for effect in effects for x in effect.written}
    edges: WriteEdges = {}
    for node, effect in zip(ops, effects, strict=True):
        written = {memory.root(operand) for operand in effect.written}
        for root in dict.fromkeys(memory.root(operand) for operand in node.all_input_nodes):
            if root in written:
                tensors[root].write(part_of[node], edges)
            elif root in tensors and not is_question(node):
                tensors[root].read(part_of[node], edges)
    return edges


def writes_in_place(module: GraphModule, ops: Iterable[Node]) -> bool:
    """Return whether any of `ops`, operators of `module`, writes into an operand. Quick."""
    known: dict[object, bool | None] = {}
    return any(effects_of(module, node).written for node in ops if _may_write(node, known))


def _may_write(node: Node, known: dict[object, bool | None]) -> bool:
    """Return False only for a node that writes nothing, by a cheap test.

    `known` caches `_function_may_write` by function.
    """
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") or "out" in node.kwargs
    target = node.target
    if target not in known:
        known[target] = _function_may_write(target)
    may_write = known[target]
    if may_write is not None:
        return may_write
    switched = bool(node.kwargs) and not _SWITCHES.isdisjoint(node.kwargs)
    return switched or any(argument is True for argument in node.args)


def _function_may_write(function: object) -> bool | None:
    """Return whether a function may write; None where that depends on an argument."""
    if isinstance(function, HigherOrderOperator):
        return True
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(getattr(function, "__name__", ""))
    if getattr(function, "__module__", "") == "_operator":
        return name.startswith("i") or name in {"setitem", "delitem"}
    return True if name.endswith("_") or name.startswith("embedding") else None


class _Tensor:
    """A tensor that is written into: its last writer, and the readers since then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._writer = -1
        self._readers: dict[int, None] = {}

    def read(self, part: int, edges: WriteEdges) -> None:
        """Order a reader after the last write."""
        self._add(self._writer, part, edges)
        self._readers[part] = None

    def write(self, part: int, edges: WriteEdges) -> None:
        """Order a write after the last write and after all readers in between."""
        for before in (self._writer, *self._readers):
            self._add(before, part, edges)
        self._writer, self._readers = part, {}

    def _add(self, before: int, after: int, edges: WriteEdges) -> None:
        if before not in {-1, after}:
            edges.setdefault((before, after), self.name)
