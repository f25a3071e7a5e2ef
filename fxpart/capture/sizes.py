"""`Sizes`: values of a captured program with numbers substituted for its symbols.

A program exported with symbolic dimensions has tensors whose sizes are expressions. Given numbers
for the symbols, each becomes a meta tensor of concrete sizes; tensors that share a storage still
do. Values of a program without symbols are unchanged.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from fxpart.capture.calls import storage_key
from fxpart.errors import CaptureError

__all__ = ["Sizes", "example_sizes", "solved"]

_SYMBOLIC = (SymInt, SymFloat, SymBool)


class Sizes:
    """Values of a program's nodes, with numbers substituted for its symbols."""

    def __init__(self, numbers: Mapping[sympy.Symbol, int]) -> None:
        self._numbers = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
        self._known: dict[sympy.Basic, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        """Values by node, since most nodes have several readers."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """By the program's storages, which it keeps alive so that no address is reused."""

    def of(self, node: fx.Node) -> Any:  # noqa: ANN401 - a node's value is anything
        """Return the value of `node`, with tensors of concrete sizes, or None if it has no value.

        Raises:
            CaptureError: if a size depends on more than the symbols.

        """
        if not self._numbers:
            return node.meta.get("val")
        if node not in self._values:
            self._values[node] = self._at_numbers(node.meta.get("val"))
        return self._values[node]

    @property
    def are_symbolic(self) -> bool:
        """Whether the program has symbols; counts must then be polynomials in them."""
        return bool(self._numbers)

    def is_size(self, node: fx.Node) -> bool:
        """Return whether a call only computes or checks sizes; always False without symbols."""
        if not self._numbers or node.op != "call_function":
            return False
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            return self._knows(value)
        operands = [operand.meta.get("val") for operand in node.all_input_nodes]
        is_check = value is None and bool(operands)
        return is_check and all(isinstance(v, _SYMBOLIC) and self._knows(v) for v in operands)

    def _knows(self, value: SymInt | SymFloat | SymBool) -> bool:
        return all(symbol in self._numbers for symbol in value.node.expr.free_symbols)

    def _at_numbers(self, value: Any) -> Any:  # noqa: ANN401 - a node's value is anything
        if isinstance(value, _SYMBOLIC):
            return self._number(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return type(value)([self._at_numbers(item) for item in value])
        return value

    def _number(self, value: Any) -> Any:  # noqa: ANN401 - an int, a float or a bool
        """Return an expression's number, without `int`, which would fix the symbol permanently."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = value.node.expr
        if expression not in self._known:
            result = sympy.sympify(expression).xreplace(self._numbers)
            if result.free_symbols:
                raise CaptureError(
                    f"a size is {result}, which depends on the values of a tensor and not on the"
                    " sizes of the inputs alone; take sizes from shapes"
                )
            self._known[expression] = _plain(value, result)
        return self._known[expression]

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        sizes = [self._number(size) for size in tensor.shape]
        strides = [self._number(stride) for stride in tensor.stride()]
        offset = self._number(tensor.storage_offset())
        storage = self._storage(tensor)
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(storage, offset, sizes, strides)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        key = storage_key(tensor)
        if key not in self._storages:
            bytes_ = self._number(tensor.untyped_storage().nbytes())
            self._storages[key] = torch.UntypedStorage(bytes_, device="meta")  # type: ignore[no-untyped-call]
        return self._storages[key]


def _plain(value: SymInt | SymFloat | SymBool, result: sympy.Basic) -> bool | int | float:
    if isinstance(value, SymBool):
        return bool(result)
    return float(result) if isinstance(value, SymFloat) else int(result)


def example_sizes(placeholders: Iterable[fx.Node]) -> Sizes:
    """Return the `Sizes` at the example inputs of the capture."""
    numbers: dict[sympy.Symbol, int] = {}
    for node in placeholders:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, SymInt) and size.node.hint is not None:
                numbers |= solved(size.node.expr, int(size.node.hint))
    return Sizes(numbers)


def solved(expression: sympy.Expr, number: int) -> dict[sympy.Symbol, int]:
    """Solve `expression` = `number` for the single symbol of `expression`.

    Empty if there is no symbol or several, or if it is not a multiple plus a constant.
    """
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return {}
    factor, offset = expression.coeff(symbols[0], 1), expression.coeff(symbols[0], 0)
    if not (factor.is_Integer and offset.is_Integer and factor):
        return {}
    return {symbols[0]: (number - int(offset)) // int(factor)}
