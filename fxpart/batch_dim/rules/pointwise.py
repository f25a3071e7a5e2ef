"""Rules of operators that work element by element."""

from dataclasses import replace

import torch
from torch import fx

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.rules.terms import SCALES, added, combined, multiplied, unlinear

__all__ = ["add", "choice", "divide", "gradient", "multiply", "pointwise", "same"]


def _tensors(call: Call) -> list[object]:
    """Return the arguments that enter the result: nodes, and numbers beside them."""
    return [leaf for leaf in call.leaves() if isinstance(leaf, fx.Node) and leaf in call.state]


def pointwise(call: Call) -> list[Layout]:
    """Return the layout of any function element by element."""
    return [unlinear(call, _tensors(call), call.rank())]


def same(call: Call) -> list[Layout]:
    """Return the layout of a copy or cast; a sum of parts rounded to whole numbers is no sum."""
    operand = call.first()
    found = call.layout(operand)
    before, after = operand.meta["val"], call.node.meta["val"]
    if found.is_partial and not after.is_floating_point() and before.dtype != after.dtype:
        return [call.whole(operand)]
    return [found]


def add(call: Call) -> list[Layout]:
    """Return the layout of a sum or difference of two, each maybe a number."""
    return [added(call, [call.arguments["self"], call.arguments["other"]], call.rank())]


def choice(call: Call) -> list[Layout]:
    """Return the layout of ``where`` and ``masked_fill``: of the two to choose from."""
    arguments, rank = call.arguments, call.rank()
    condition = arguments.get("condition", arguments.get("mask"))
    two = [arguments["self"], arguments.get("other", arguments.get("value"))]
    mask = call.aligned(condition, rank, call.whole(condition))
    if mask.is_split and any(call.layout(value).is_partial for value in two):
        two_layouts = [call.aligned(value, rank, call.whole(value)) for value in two]
        return [combined([mask, *two_layouts])]
    found = added(call, two, rank)
    if not mask.is_split:
        return [found]
    both = combined([mask, found])
    return [replace(both, scale=found.scale, is_zero=found.is_zero)]


def multiply(call: Call) -> list[Layout]:
    """Return the layout of a product of two, each maybe a number."""
    return [multiplied(call, [call.arguments["self"], call.arguments["other"]], call.rank())]


def divide(call: Call) -> list[Layout]:
    """Return the layout of a quotient.

    What is first repeated for each example and then divided by a number of elements is the gradient
    of a mean. With sizes that are numbers, a divisor that the batch divides is taken for one.
    """
    above, below = call.arguments["self"], call.arguments["other"]
    if call.arguments.get("rounding_mode") is not None:
        return pointwise(call)
    found = multiplied(call, [above, below], call.rank(), [1, -1])
    if not (isinstance(below, int | float) and isinstance(above, fx.Node) and found.is_split):
        return [found]
    source = above.args[0] if above.target is torch.ops.aten.expand.default else None
    size = (call.results[0] or ())[found.dim]
    if isinstance(source, fx.Node) and isinstance(size, int) and not call.layout(source).is_split:
        call.by_size = True
        return [replace(found, scale=found.scale + (below >= size and below % size == 0))]
    return [found]


def gradient(call: Call) -> list[Layout]:
    """Return the layout of a gradient: linear in the first argument, element by element."""
    values = _tensors(call)
    grad = call.layout(values[0])
    others = [call.layout(value) for value in values[1:]]
    if grad.is_partial and not any(x.is_split or x.is_partial for x in others):
        return [grad]
    grad = call.whole(values[0])
    found = unlinear(call, values[1:], call.rank())
    both = combined([call.aligned(values[0], call.rank(), grad), found])
    differs = both.differs or (SCALES if found.differs == SCALES else "")
    return [replace(both, scale=grad.scale, differs=differs, is_zero=grad.is_zero)]
