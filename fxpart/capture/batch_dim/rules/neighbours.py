"""Rules of operators in which elements depend on their neighbours: scans, softmax, windows, norms.

Where the neighbours belong to the same example, each example is independent. Where they are other
examples, a process only has its own ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.layout import Layout
from fxpart.capture.batch_dim.rules.per_example import SCALES, per_example

__all__ = [
    "ALONG",
    "LINEAR_SCANS",
    "along",
    "attention",
    "band",
    "normalized",
    "pad",
    "softmax_backward",
    "spatial",
]


ALONG = "goes along the batch: a process goes along its own examples only"
BAND = "compares positions within the batch: a process counts its own examples from 0"
PADDED = "adds elements along the batch: a process adds them to its own examples"
LINEAR_SCANS = frozenset({"cumsum", "diff", "flip", "roll"})
"""Linear operators along a dimension: from terms of a sum they make terms of a sum."""


def along(call: Call) -> list[Layout]:
    """Return the layouts of sorts, scans and softmax, which work along a dimension."""
    operand = call.first()
    at = call.layout(operand) if call.name in LINEAR_SCANS else call.whole(operand)
    if not at.is_split:
        return [at for _ in call.results]
    rank = len(call.sizes(operand))
    chosen = call.arguments.get("dim", call.arguments.get("dims", -1))
    dims = [chosen] if isinstance(chosen, int) else list(chosen or range(rank))
    nonlinear = at.scale and call.name not in LINEAR_SCANS
    differs = at.differs or (SCALES if nonlinear else "")
    if at.dim in [dim % rank for dim in dims]:
        differs = differs or ALONG
    return [replace(at, differs=differs, is_zero=False) for _ in call.results]


def softmax_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of a softmax, which is linear in the incoming gradient."""
    grad = call.whole(call.first())
    output = call.whole(call.arguments["output"])
    at = grad if grad.is_split else output
    rank = len(call.sizes(call.first()))
    differs = ALONG if at.dim == int(call.arguments["dim"]) % rank else ""
    return [replace(at, scale=grad.scale, differs=at.differs or differs)]


def band(call: Call) -> list[Layout]:
    """Return the layout of ``tril`` and ``triu``, which compare the last two indices."""
    at, rank = call.layout(call.first()), call.rank()
    return [replace(at, differs=at.differs or BAND) if at.dim >= rank - 2 and at.is_split else at]


def pad(call: Call) -> list[Layout]:
    """Return the layout of a tensor that is padded, or cropped."""
    operand, rank = call.first(), call.rank()
    value = call.arguments.get("value")
    at = call.layout(operand)
    if value and at.is_partial and at.scale != 1:
        # The padding would be summed over processes; only in a mean it keeps its value.
        at = call.whole(operand)
    widths = call.arguments.get("pad", call.arguments.get("padding"))
    layout = replace(at, is_zero=at.is_zero and not value)
    if not at.is_split:
        return [layout]
    differs = SCALES if value and at.scale else ""
    if _is_padded(widths, rank - 1 - at.dim):
        return [replace(layout, outer=1, differs=at.differs or PADDED)]
    return [replace(layout, differs=at.differs or differs)]


def _is_padded(widths: object, from_the_end: int) -> bool:
    """Return whether a dimension, counted from the last one, becomes longer or shorter."""
    both = list(widths) if isinstance(widths, Sequence) else []
    return any(width != 0 for width in both[2 * from_the_end : 2 * from_the_end + 2])


def spatial(call: Call) -> list[Layout]:
    """Return the layouts of convolutions, pools and resizes over the last dimensions."""
    rank = len(call.sizes(call.first()))
    named = next((int(digit) for digit in call.name if digit in "123"), rank - 2)
    return _alone(call, range(rank - named, rank))


def normalized(call: Call) -> list[Layout]:
    """Return the layouts of a normalization by the statistics of some dimensions."""
    rank = len(call.sizes(call.first()))
    shape = call.arguments.get("normalized_shape")
    if shape is not None:
        return _alone(call, range(rank - len(shape), rank))
    return _alone(call, range(2 if call.name == "instance_norm" else 1, rank))


def attention(call: Call) -> list[Layout]:
    """Return the layouts of attention, between queries and keys in the last dimension but one."""
    rank = len(call.sizes(call.first()))
    return _alone(call, range(rank - 2, rank))


def _alone(call: Call, joined: range) -> list[Layout]:
    """Return the layouts where elements along `joined` dimensions of operand 0 are combined."""
    at = call.layout(call.first())
    if at.dim not in joined:
        return per_example(call)
    for operand in call.operands:
        call.whole(operand)
    differs = at.differs or ALONG
    return [
        replace(at, dim=min(at.dim, len(sizes) - 1), outer=1, differs=differs)
        if sizes
        else Layout()
        for sizes in call.results
    ]
