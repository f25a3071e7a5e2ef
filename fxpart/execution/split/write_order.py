"""Order partitions around in-place writes.

Whether a node that reads a tensor under an older name sees the elements from before or after a
write depends on graph order alone, not on a data dependence. So partitions that access a tensor
written in place keep the graph's order around each write.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from fxpart.execution.split.effects import SharedMemory, effects_of, is_question
from fxpart.execution.split.graph_module import fetched

__all__ = ["WriteEdges", "write_edges", "writes_in_place"]

_SWITCHES = frozenset({"inplace", "out", "max_norm"})
"""Arguments that make a function write into an operand."""

WriteEdges = dict[tuple[int, int], str]
"""Pairs of partitions, the first of which must run before the second, and the tensor's name."""


def write_edges(
    module: GraphModule, ops: Sequence[Node], part_of: Mapping[Node, int]
) -> WriteEdges:
    """Return the pairs of partitions ordered by in-place writes. O(graph).

    Writes and aliases are those of `effects_of`; querying a size does not count as a read. Empty
    for a graph without writes.

    Args:
        module: the module to cut.
        ops: its operators with a partition, in graph order.
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
    """Return whether any of `ops`, operators of `module`, writes into an operand. Fast."""
    may_write_of: dict[object, bool | None] = {}
    return any(effects_of(module, node).written for node in ops if _may_write(node, may_write_of))


def _may_write(node: Node, known: dict[object, bool | None]) -> bool:
    """Return whether a node may write, by a cheap test; False is certain.

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
    """A tensor written in place: its last writer, and the readers since."""

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
        for accessor in (self._writer, *self._readers):
            self._add(accessor, part, edges)
        self._writer, self._readers = part, {}

    def _add(self, before: int, after: int, edges: WriteEdges) -> None:
        if before not in {-1, after}:
            edges.setdefault((before, after), self.name)
