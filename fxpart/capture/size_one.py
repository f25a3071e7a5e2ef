"""What a size of 1 makes needless, and a capture of that size does not have.

A matrix with its dimensions swapped is not contiguous, unless one of them is 1: then asking for a
contiguous one copies nothing. A gradient is not summed over a dimension of 1. A symbolic program
does both at every size: at 1 it has a few operators more.
"""

from collections.abc import Mapping

import sympy
from torch import Tensor, fx, ops
from torch.export import ExportedProgram

from fxpart.capture.joint_labels import FORWARD
from fxpart.capture.sizes import Sizes

__all__ = ["exact_from"]

_ATEN = ops.aten
_COPIES = (_ATEN.contiguous.default, _ATEN.clone.default)
_SUM = _ATEN.sum.dim_IntList


def exact_from(
    program: ExportedProgram, symbols: Mapping[str, sympy.Symbol], example: Mapping[str, int]
) -> tuple[int, ...]:
    """Return for each symbol 2 where a size of 1 makes operators of `program` needless, else 1.

    Args:
        program: what was captured, a model or a training step.
        symbols: by symbol, torch's.
        example: by symbol, its value in the example inputs.

    """
    nodes = [
        node
        for body in program.graph_module.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
        if node.op == "call_function" and _may_be_needless(node)
    ]
    usual = Sizes({symbols[name]: number for name, number in example.items()})
    found: list[int] = []
    for name in example:
        one = Sizes({symbols[n]: 1 if n == name else v for n, v in example.items()})
        saved = any(_is_needed(node, usual) and not _is_needed(node, one) for node in nodes)
        found.append(2 if saved else 1)
    return tuple(found)


def _may_be_needless(node: fx.Node) -> bool:
    if node.target is _ATEN.clone.default:
        # Without a format it is a copy that the model asks for.
        return node.kwargs.get("memory_format") is not None
    if node.target is _SUM:
        # Of the backward: the model's own sums stay. So does one over a dimension that the result
        # then loses, which is of another rank than what was added to.
        is_lost = any(user.target is _ATEN.view.default for user in node.users)
        return node.meta.get(FORWARD) is not None and not is_lost
    return node.target in (*_COPIES, _ATEN.reshape.default)


def _is_needed(node: fx.Node, sizes: Sizes) -> bool:
    source = node.args[0]
    before = sizes.of(source) if isinstance(source, fx.Node) else None
    if not isinstance(before, Tensor):
        return False
    if node.target is _SUM:
        return bool(before.numel() != sizes.of(node).numel())
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
