"""`Dependencies`: operators, inputs and outputs of each partition, from one walk over the graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxpart.execution.split.regions import STATE_TARGETS

__all__ = ["PLACELESS", "BoundSymbols", "Dependencies", "dependencies_of"]


PLACELESS = frozenset({"placeholder", "get_attr", "output"})
"""Kinds of nodes that belong to no partition."""


class BoundSymbols:
    """The node that defines each symbolic size, for the part of a graph walked so far.

    A partition that receives a tensor also receives the symbols in its shape, since compilers of a
    submodule require a varying size to be an input. The symbols are in ``meta["example_value"]``,
    as set by torch.compile; a symbol is defined by the first node whose example is that bare
    symbol: a placeholder, if any.
    """

    def __init__(self) -> None:
        self._node_of: dict[object, Node] = {}

    def enter(self, node: Node) -> None:
        """Record `node` if it defines a symbol."""
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            expression = value.node.expr
            if expression.is_Symbol:
                self._node_of.setdefault(expression, node)

    def behind(self, node: Node) -> list[Node]:
        """Return the nodes that define the symbols in the shape of `node`, sorted by symbol.

        A symbol that no node has defined yet is skipped, as there is nothing to pass.
        """
        value = node.meta.get("example_value") if self._node_of else None
        if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | list | tuple):
            return []
        # Importing sympy is slow, and most graphs have no symbols.
        from torch.fx.experimental.symbolic_shapes import free_symbols

        symbols = sorted(free_symbols(value), key=str)
        return [self._node_of[symbol] for symbol in symbols if symbol in self._node_of]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Operators, inputs and outputs of the partitions ``0..P-1`` of a graph."""

    part_of: Mapping[Node, int]
    """Partition of each operator."""
    ops: tuple[tuple[Node, ...], ...]
    """Operators of each partition in graph order. Length P."""
    inputs: tuple[tuple[Node, ...], ...]
    """Values each partition reads from elsewhere, in the order of first use. Length P."""
    outputs: tuple[tuple[Node, ...], ...]
    """Values of each partition read by others or the caller, in order of first use. Length P."""
    after: tuple[tuple[int, ...], ...]
    """Partitions that read from each partition, in the order of first use. Length P."""


class _Walk:
    """The partitions built so far. Dictionaries serve as ordered sets."""

    def __init__(self, part_of: Mapping[Node, int], count: int, symbols: BoundSymbols) -> None:
        self.part_of = part_of
        self.ops: list[list[Node]] = [[] for _ in range(count)]
        self.inputs: list[dict[Node, None]] = [{} for _ in range(count)]
        self.outputs: list[dict[Node, None]] = [{} for _ in range(count)]
        self.after: list[dict[int, None]] = [{} for _ in range(count)]
        self.symbols = symbols

    def pass_on(self, value: Node, reader: int) -> None:
        """Pass `value` to partition `reader`, unless `reader` computes it itself."""
        maker = self.part_of.get(value, -1)
        if maker == reader:
            return
        self.inputs[reader][value] = None
        if maker >= 0:
            self.outputs[maker][value] = None
            self.after[maker][reader] = None

    def visit(self, node: Node) -> None:
        """Add an operator, and pass its operands to its partition."""
        part = self.part_of[node]
        self.ops[part].append(node)
        # Each partition enters and exits modes itself, so nothing is passed.
        if node.target in STATE_TARGETS:
            return
        for operand in node.all_input_nodes:
            if self.part_of.get(operand, -1) != part:
                self.pass_on(operand, part)
                for symbol in self.symbols.behind(operand):
                    self.pass_on(symbol, part)


def dependencies_of(
    module: GraphModule, part_of: Mapping[Node, int], count: int, *, with_symbols: bool = True
) -> Dependencies:
    """Return operators, inputs and outputs of the partitions of a graph. O(nodes + edges).

    Args:
        module: the module to cut.
        part_of: partition of each operator that has one.
        count: number of partitions, P.
        with_symbols: whether partitions also receive the symbols in the shapes of their inputs.

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
