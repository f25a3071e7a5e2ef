"""Copies that a size of 1 makes needless, and that a capture of that size does not have.

A matrix with its dimensions swapped is not contiguous, unless one of them is 1: then asking for a
contiguous one copies nothing. A symbolic program copies at every size, so that it holds from 2 on.
"""

from collections.abc import Mapping, Sequence

import sympy
from torch import Tensor, fx, ops
from torch.export import ExportedProgram

from fxpart.capture.sizes import Sizes
from fxpart.capture.symbolic_range import Ranges

__all__ = ["with_least"]

_ATEN = ops.aten
_COPIES = (_ATEN.contiguous.default, _ATEN.clone.default)


def with_least(
    ranges: Ranges,
    program: ExportedProgram,
    symbols: Mapping[str, sympy.Symbol],
    example: Mapping[str, int],
) -> Ranges:
    """Return `ranges` from 2 instead of 1 for the symbols whose size of 1 saves a copy.

    Args:
        ranges: by symbol, the smallest and largest value.
        program: what was captured.
        symbols: by symbol, torch's.
        example: by symbol, its value in the example inputs.

    """
    nodes = [
        node
        for body in program.graph_module.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
        if node.op == "call_function" and _may_copy(node)
    ]
    usual = Sizes({symbols[name]: number for name, number in example.items()})
    found = dict(ranges)
    for name, (low, high) in ranges.items():
        if low == 1:
            one = Sizes({symbols[n]: 1 if n == name else v for n, v in example.items()})
            found[name] = (2 if _saves(nodes, usual, one) else 1, high)
    return found


def _may_copy(node: fx.Node) -> bool:
    if node.target is _ATEN.clone.default:
        # Without a format it is a copy that the model asks for.
        return node.kwargs.get("memory_format") is not None
    return node.target in (*_COPIES, _ATEN.reshape.default)


def _saves(nodes: Sequence[fx.Node], usual: Sizes, one: Sizes) -> bool:
    return any(_needs_copy(node, usual) and not _needs_copy(node, one) for node in nodes)


def _needs_copy(node: fx.Node, sizes: Sizes) -> bool:
    source = node.args[0]
    before = sizes.of(source) if isinstance(source, fx.Node) else None
    if not isinstance(before, Tensor):
        return False
    if node.target is _ATEN.reshape.default:
        return not _is_view(before, sizes.of(node))
    reshaped = [user for user in node.users if user.target is _ATEN._unsafe_view.default]
    if reshaped and any(_is_view(before, sizes.of(user)) for user in reshaped):
        return False
    return not before.is_contiguous()


def _is_view(before: Tensor, after: Tensor) -> bool:
    """Return whether a tensor has the elements of `before` in the shape of `after` by strides."""
    try:
        before.view(after.shape)
    except RuntimeError:
        return False
    return True
