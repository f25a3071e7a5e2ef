"""Sizes of a graph with symbols, computed from its inputs and from nothing else.

A trace asks the tensor at hand for its size, so that a backward would keep activations only to know
how large they were. The same number follows from the sizes of the inputs.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

from fxpart.capture.joint_labels import EXPORTED, FORMULA, FORWARD, ORDER

__all__ = ["compute_sizes_from_inputs"]

_Arithmetic = Callable[[Any, Any], Any]


def compute_sizes_from_inputs(graph: fx.Graph) -> None:
    """Let every size that `graph` computes be computed from sizes of its placeholders.

    A size that is no polynomial in them stays as it is. A graph without symbols is not changed.
    """
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SymInt):
            made = sizes.node_of(value.node.expr)
            if made is not None and made is not node:
                node.replace_all_uses_with(made)


@dataclass(eq=False)
class _Sizes:
    """The nodes that compute sizes, each once, right after the placeholders."""

    graph: fx.Graph
    made: dict[sympy.Expr, fx.Node] = field(default_factory=dict)
    """By the size."""
    asked: dict[sympy.Symbol, tuple[fx.Node, int]] = field(default_factory=dict)
    """The placeholder, and its dimension, that has the size."""
    last: fx.Node = field(init=False)
    """Sizes are computed after this node."""

    def __post_init__(self) -> None:
        """Find out which symbols the inputs have as sizes."""
        placeholders = self.graph.find_nodes(op="placeholder")
        for node in placeholders:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self.asked.setdefault(size.node.expr, (node, dim))
        self.last = placeholders[-1]

    def node_of(self, size: sympy.Expr) -> fx.Node | None:
        """Return the node that computes `size`; None where it is no polynomial in the inputs'."""
        if size in self.made:
            return self.made[size]
        if not size.free_symbols <= self.asked.keys() or not size.is_polynomial():
            return None
        terms = [self._product(term) for term in sympy.Add.make_args(size.expand())]
        found = self._joined(operator.add, terms)
        if isinstance(found, fx.Node):
            self.made[size] = found
        return self.made.get(size)

    def _product(self, term: sympy.Expr) -> fx.Node | int:
        factors: list[fx.Node | int] = []
        for factor in sympy.Mul.make_args(term):
            base, exponent = factor.as_base_exp()
            part = int(base) if base.is_Integer else self._symbol(base)
            factors += [part] * int(exponent)
        return self._joined(operator.mul, factors)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self.made:
            node, dim = self.asked[symbol]
            size = node.meta["val"].shape[dim]
            self.made[symbol] = self._call(torch.ops.aten.sym_size.int, (node, dim), size)
        return self.made[symbol]

    def _joined(self, how: _Arithmetic, parts: list[fx.Node | int]) -> fx.Node | int:
        def two(left: fx.Node | int, right: fx.Node | int) -> fx.Node | int:
            shown = [part if isinstance(part, int) else part.meta["val"] for part in (left, right)]
            return self._call(how, (left, right), how(*shown))

        return reduce(two, parts)

    def _call(
        self, target: Callable[..., Any], args: tuple[fx.Node | int, ...], value: SymInt
    ) -> fx.Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args)
        node.meta.update({"val": value, "nn_module_stack": {}, ORDER: -1})
        node.meta.update(dict.fromkeys((FORWARD, EXPORTED, FORMULA)))
        self.last = node
        return node
