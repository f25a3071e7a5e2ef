"""Rules for elementwise operators."""

from dataclasses import replace

import torch
from torch import fx

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.extent import product
from fxpart.capture.batch_dim.layout import Layout
from fxpart.capture.batch_dim.rules.per_example import SCALES, added, combined, multiplied, unlinear

__all__ = ["add", "choice", "divide", "gradient", "multiply", "pointwise", "same"]


def _tensors(call: Call) -> list[object]:
    """Return the nodes among the arguments."""
    return [leaf for leaf in call.leaves() if isinstance(leaf, fx.Node) and leaf in call.state]


def pointwise(call: Call) -> list[Layout]:
    """Return the layout of any elementwise function."""
    return [unlinear(call, _tensors(call), call.rank())]


def same(call: Call) -> list[Layout]:
    """Return the layout of a copy or cast; a partial value must be summed before it is rounded."""
    operand = call.first()
    layout = call.layout(operand)
    source, result = operand.meta["val"], call.node.meta["val"]
    if layout.is_partial and not result.is_floating_point() and source.dtype != result.dtype:
        return [call.whole(operand)]
    return [layout]


def add(call: Call) -> list[Layout]:
    """Return the layout of a sum or difference of two tensors or numbers."""
    return [added(call, [call.arguments["self"], call.arguments["other"]], call.rank())]


def choice(call: Call) -> list[Layout]:
    """Return the layout of ``where`` and ``masked_fill``, which choose from two values."""
    arguments, rank = call.arguments, call.rank()
    condition = arguments.get("condition", arguments.get("mask"))
    options = [arguments["self"], arguments.get("other", arguments.get("value"))]
    mask = call.aligned(condition, rank, call.whole(condition))
    if mask.is_split and any(call.layout(value).is_partial for value in options):
        two_layouts = [call.aligned(value, rank, call.whole(value)) for value in options]
        return [combined([mask, *two_layouts])]
    chosen = added(call, options, rank)
    if not mask.is_split:
        return [chosen]
    position = combined([mask, chosen])
    return [replace(position, scale=chosen.scale, is_zero=chosen.is_zero)]


def multiply(call: Call) -> list[Layout]:
    """Return the layout of a product of two tensors or numbers."""
    return [multiplied(call, [call.arguments["self"], call.arguments["other"]], call.rank())]


def divide(call: Call) -> list[Layout]:
    """Return the layout of a quotient.

    The gradient of a mean is divided by a number of elements, which depends on the batch. If sizes
    are numbers, a divisor counts as such if it equals the number of elements of the result, or if
    the batch divides it and the dividend was just repeated for each example.
    """
    above, below = call.arguments["self"], call.arguments["other"]
    if call.arguments.get("rounding_mode") is not None:
        return pointwise(call)
    layout = multiplied(call, [above, below], call.rank(), [1, -1])
    if not (isinstance(below, int | float) and isinstance(above, fx.Node) and layout.is_split):
        return [layout]
    sizes = call.results[0] or ()
    size = sizes[layout.dim]
    if isinstance(size, int) and (below == product(sizes) or _divides_repeated(call, above, size)):
        call.by_size = True
        return [replace(layout, scale=layout.scale + 1)]
    return [layout]


def _divides_repeated(call: Call, above: fx.Node, size: int) -> bool:
    """Return whether `above` was just repeated for each example, and the batch divides `below`."""
    below = call.arguments["other"]
    if above.target is not torch.ops.aten.expand.default or below < size or below % size:
        return False
    return not call.layout(above.args[0]).is_split


def gradient(call: Call) -> list[Layout]:
    """Return the layout of an elementwise gradient, which is linear in the first argument."""
    values = _tensors(call)
    grad = call.layout(values[0])
    other_layouts = [call.layout(value) for value in values[1:]]
    if grad.is_partial and not any(x.is_split or x.is_partial for x in other_layouts):
        return [grad]
    grad = call.whole(values[0])
    factor = unlinear(call, values[1:], call.rank())
    position = combined([call.aligned(values[0], call.rank(), grad), factor])
    differs = position.differs or (SCALES if factor.differs == SCALES else "")
    return [replace(position, scale=grad.scale, differs=differs, is_zero=grad.is_zero)]
