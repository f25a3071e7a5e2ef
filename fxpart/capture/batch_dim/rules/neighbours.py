"""Rules of operators to which the place of an element among its neighbours matters.

Where the neighbours are of the same example, each example is treated alone. Where they are other
examples, a process sees its own ones only.
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


# Rules of operators that work along one dimension: sorts, scans, softmax.

ALONG = "goes along the batch: a process goes along its own examples only"
LINEAR_SCANS = frozenset({"cumsum", "diff", "flip", "roll"})
"""Those that are linear: of parts of a sum they make parts of a sum."""


def along(call: Call) -> list[Layout]:
    """Return the layouts of results that keep the dimensions of the operand."""
    operand = call.first()
    at = call.layout(operand) if call.name in LINEAR_SCANS else call.whole(operand)
    if not at.is_split:
        return [at for _ in call.results]
    rank = len(call.sizes(operand))
    asked = call.arguments.get("dim", call.arguments.get("dims", -1))
    dims = [asked] if isinstance(asked, int) else list(asked or range(rank))
    nonlinear = at.scale and call.name not in LINEAR_SCANS
    differs = at.differs or (SCALES if nonlinear else "")
    if at.dim in [dim % rank for dim in dims]:
        differs = differs or ALONG
    return [replace(at, differs=differs, is_zero=False) for _ in call.results]


def softmax_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of a softmax: linear in the gradient."""
    grad = call.whole(call.first())
    output = call.whole(call.arguments["output"])
    at = grad if grad.is_split else output
    rank = len(call.sizes(call.first()))
    differs = ALONG if at.dim == int(call.arguments["dim"]) % rank else ""
    return [replace(at, scale=grad.scale, differs=at.differs or differs)]


BAND = "compares positions within the batch: a process counts its own examples from 0"
PADDED = "adds elements along the batch: a process adds them to its own examples"


def band(call: Call) -> list[Layout]:
    """Return the layout of ``tril`` and ``triu``: what is kept depends on the last two places."""
    at, rank = call.layout(call.first()), call.rank()
    return [replace(at, differs=at.differs or BAND) if at.dim >= rank - 2 and at.is_split else at]


def pad(call: Call) -> list[Layout]:
    """Return the layout of a tensor with elements before and after it, or with fewer."""
    operand, rank = call.first(), call.rank()
    value = call.arguments.get("value")
    at = call.layout(operand)
    if value and at.is_partial and at.scale != 1:
        # The number would be added up: only in a mean it stays what it is.
        at = call.whole(operand)
    widths = call.arguments.get("pad", call.arguments.get("padding"))
    found = replace(at, is_zero=at.is_zero and not value)
    if not at.is_split:
        return [found]
    differs = SCALES if value and at.scale else ""
    if _is_padded(widths, rank - 1 - at.dim):
        return [replace(found, outer=1, differs=at.differs or PADDED)]
    return [replace(found, differs=at.differs or differs)]


def _is_padded(widths: object, from_the_end: int) -> bool:
    """Whether a dimension, counted from the last one, becomes longer or shorter."""
    both = list(widths) if isinstance(widths, Sequence) else []
    return any(width != 0 for width in both[2 * from_the_end : 2 * from_the_end + 2])


def spatial(call: Call) -> list[Layout]:
    """Return the layouts of convolutions, pools and resizes: the last dimensions are space."""
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
    """Return the layouts of attention: queries meet keys, both along the last dimension but one."""
    rank = len(call.sizes(call.first()))
    return _alone(call, range(rank - 2, rank))


def _alone(call: Call, joined: range) -> list[Layout]:
    """Return the layouts where `joined` are the dimensions of the first operand that are joined."""
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
