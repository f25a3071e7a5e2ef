"""What each partition computes, takes and gives: one walk over the graph, O(nodes + edges)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxpart.execution.split.regions import STATE_TARGETS

__all__ = ["PLACELESS", "BoundSymbols", "Dependencies", "dependencies_of"]


# Symbolic sizes: a partition that receives a tensor receives the symbols in its shape too.
#
# Compilers of a submodule ask for that: a size that varies must be an input of the submodule. Which
# symbols there are stands in ``meta["example_value"]``, as torch.compile leaves it.


class BoundSymbols:
    """Which node makes each symbol, as far as a walk over the graph has come.

    The first node counts whose example is the bare symbol: that is a placeholder where one is.
    """

    def __init__(self) -> None:
        self._node_of: dict[object, Node] = {}

    def enter(self, node: Node) -> None:
        """Remember `node` if it makes a symbol."""
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            expression = value.node.expr
            if expression.is_Symbol:
                self._node_of.setdefault(expression, node)

    def behind(self, node: Node) -> list[Node]:
        """Return the nodes that make the symbols in the shape of `node`, sorted by symbol.

        A symbol that nothing before makes is left out: there is nothing to pass.
        """
        value = node.meta.get("example_value") if self._node_of else None
        if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | list | tuple):
            return []
        # Sympy and the symbolic shapes are heavy, and most graphs have none.
        from torch.fx.experimental.symbolic_shapes import free_symbols

        found = sorted(free_symbols(value), key=str)
        return [self._node_of[symbol] for symbol in found if symbol in self._node_of]


PLACELESS = frozenset({"placeholder", "get_attr", "output"})
"""Kinds of nodes that belong to no partition."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Partitions ``0..P-1`` of a graph, each by what it computes, takes and gives."""

    part_of: Mapping[Node, int]
    """Partition of each operator."""
    ops: tuple[tuple[Node, ...], ...]
    """Operators of each partition in graph order. Length P."""
    inputs: tuple[tuple[Node, ...], ...]
    """What each partition takes, in the order of first use. Length P."""
    outputs: tuple[tuple[Node, ...], ...]
    """What each partition gives to others or to the caller, in the order of first use. Length P."""
    after: tuple[tuple[int, ...], ...]
    """Partitions that read from each, in the order of first use. Length P."""


class _Walk:
    """What is known of the partitions so far. Dictionaries serve as sets that keep their order."""

    def __init__(self, part_of: Mapping[Node, int], count: int, symbols: BoundSymbols) -> None:
        self.part_of = part_of
        self.ops: list[list[Node]] = [[] for _ in range(count)]
        self.inputs: list[dict[Node, None]] = [{} for _ in range(count)]
        self.outputs: list[dict[Node, None]] = [{} for _ in range(count)]
        self.after: list[dict[int, None]] = [{} for _ in range(count)]
        self.symbols = symbols

    def pass_on(self, made: Node, user: int) -> None:
        """Let partition `user` take `made`, unless it makes that itself."""
        maker = self.part_of.get(made, -1)
        if maker == user:
            return
        self.inputs[user][made] = None
        if maker >= 0:
            self.outputs[maker][made] = None
            self.after[maker][user] = None

    def visit(self, node: Node) -> None:
        """Enter an operator with what it reads from elsewhere."""
        here = self.part_of[node]
        self.ops[here].append(node)
        # Entering and leaving a mode is repeated in each partition: nothing is passed for it.
        if node.target in STATE_TARGETS:
            return
        for operand in node.all_input_nodes:
            if self.part_of.get(operand, -1) != here:
                self.pass_on(operand, here)
                for symbol in self.symbols.behind(operand):
                    self.pass_on(symbol, here)


def dependencies_of(
    module: GraphModule, part_of: Mapping[Node, int], count: int, *, with_symbols: bool = True
) -> Dependencies:
    """Return what the partitions of the graph of `module` compute, take and give.

    Args:
        module: what is cut.
        part_of: partition of each operator. An operator that is left out is in no partition.
        count: number of partitions, P.
        with_symbols: whether a partition takes the symbols in the shapes of what it takes.

    """
    walk = _Walk(part_of, count, BoundSymbols())
    for node in module.graph.nodes:
        if node in part_of:
            walk.visit(node)
        elif node.op == "output":
            for result in node.all_input_nodes:
                if result in part_of:
                    walk.outputs[part_of[result]][result] = None
        if with_symbols:
            walk.symbols.enter(node)
    return Dependencies(
        part_of,
        tuple(tuple(row) for row in walk.ops),
        tuple(tuple(row) for row in walk.inputs),
        tuple(tuple(row) for row in walk.outputs),
        tuple(tuple(row) for row in walk.after),
    )
