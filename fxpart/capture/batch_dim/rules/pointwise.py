"""Rules of operators that work element by element."""

from dataclasses import replace

import torch
from torch import fx

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.extent import product
from fxpart.capture.batch_dim.layout import Layout
from fxpart.capture.batch_dim.rules.per_example import SCALES, added, combined, multiplied, unlinear

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

    By a number of elements the gradient of a mean is divided. With sizes that are numbers, a number
    is taken for one where it is just how many elements the result has, and where the batch divides
    it and what is divided was only now repeated for each example.
    """
    above, below = call.arguments["self"], call.arguments["other"]
    if call.arguments.get("rounding_mode") is not None:
        return pointwise(call)
    found = multiplied(call, [above, below], call.rank(), [1, -1])
    if not (isinstance(below, int | float) and isinstance(above, fx.Node) and found.is_split):
        return [found]
    sizes = call.results[0] or ()
    size = sizes[found.dim]
    if isinstance(size, int) and (below == product(sizes) or _divides_repeated(call, above, size)):
        call.by_size = True
        return [replace(found, scale=found.scale + 1)]
    return [found]


def _divides_repeated(call: Call, above: fx.Node, size: int) -> bool:
    """Whether `above` was only now repeated for each example, and the divisor is made of them."""
    below = call.arguments["other"]
    if above.target is not torch.ops.aten.expand.default or below < size or below % size:
        return False
    return not call.layout(above.args[0]).is_split


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
