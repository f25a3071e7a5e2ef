"""Which partitions must run before others because one of them writes into a tensor in place.

Data dependences say nothing about a reader of a tensor's older name: it may read what was there
before a write, or what is there after, and the graph's order alone tells which. So partitions that
touch a tensor which is written into keep the graph's order around each write.
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
    """Return the pairs of partitions whose order writes in place decide. O(graph).

    What is written into, and what may share its memory, is as `effects_of` sees it; a size that is
    asked for is no reading. Empty for a graph that writes nothing.

    Args:
        module: what is cut.
        ops: its operators that are in partitions, in graph order.
        part_of: partition of each of them.

    """
    if not writes_in_place(module, ops):
        return {}
    effects = [effects_of(module, node) for node in ops]
    names = SharedMemory()
    for node in module.graph.find_nodes(op="get_attr"):
        names.hold(node, "weight", fetched(module, str(node.target)))
    for node, effect in zip(ops, effects, strict=True):
        names.enter(node, effect.shared)
    tensors = {names.root(x): _Tensor(x.name) for effect in effects for x in effect.written}
    edges: WriteEdges = {}
    for node, effect in zip(ops, effects, strict=True):
        written = {names.root(operand) for operand in effect.written}
        for root in dict.fromkeys(names.root(operand) for operand in node.all_input_nodes):
            if root in written:
                tensors[root].write(part_of[node], edges)
            elif root in tensors and not is_question(node):
                tensors[root].read(part_of[node], edges)
    return edges


def writes_in_place(module: GraphModule, ops: Iterable[Node]) -> bool:
    """Return whether any of `ops`, operators of `module`, writes into what it reads. Quick."""
    suspicion = _Suspicion()
    return any(effects_of(module, node).written for node in ops if suspicion.falls_on(node))


class _Suspicion:
    """Whether a closer look is needed to know that a node writes nothing. Quick."""

    def __init__(self) -> None:
        self._known: dict[object, bool | None] = {}
        """By function: whether it may write; None where an argument tells."""

    def falls_on(self, node: Node) -> bool:
        """Return False only for a node that writes nothing."""
        if node.op == "call_module":
            return True
        if node.op == "call_method":
            return str(node.target).endswith("_") or "out" in node.kwargs
        target = node.target
        if target not in self._known:
            self._known[target] = _function_may_write(target)
        known = self._known[target]
        if known is not None:
            return known
        switched = bool(node.kwargs) and not _SWITCHES.isdisjoint(node.kwargs)
        return switched or any(argument is True for argument in node.args)


def _function_may_write(function: object) -> bool | None:
    """Return whether a function may write; None where only an argument can let it."""
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
    """A tensor that is written into: who wrote last, and who has read since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._writer = -1
        self._readers: dict[int, None] = {}

    def read(self, part: int, edges: WriteEdges) -> None:
        """Let a reader come after the last write."""
        self._note(self._writer, part, edges)
        self._readers[part] = None

    def write(self, part: int, edges: WriteEdges) -> None:
        """Let a write come after the last one and after all that read in between."""
        for before in (self._writer, *self._readers):
            self._note(before, part, edges)
        self._writer, self._readers = part, {}

    def _note(self, before: int, after: int, edges: WriteEdges) -> None:
        if before not in {-1, after}:
            edges.setdefault((before, after), self.name)
