"""Symbolic sizes: a partition that receives a tensor receives the symbols in its shape too.

Compilers of a submodule ask for that: a size that varies must be an input of the submodule. Which
symbols there are stands in ``meta["example_value"]``, as torch.compile leaves it.
"""

import torch
from torch.fx import Node

__all__ = ["BoundSymbols"]


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
