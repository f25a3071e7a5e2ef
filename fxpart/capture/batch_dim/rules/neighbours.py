"""Rules for operators whose elements depend on their neighbours: scans, softmax, windows, norms.

If the neighbours belong to the same example, examples are independent. If they are other examples,
a process only has its own.
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
"""Linear operators along a dimension, which map terms of a sum to terms of a sum."""


def along(call: Call) -> list[Layout]:
    """Return the layouts of sorts, scans and softmax, which work along a dimension."""
    operand = call.first()
    operand_layout = call.layout(operand) if call.name in LINEAR_SCANS else call.whole(operand)
    if not operand_layout.is_split:
        return [operand_layout for _ in call.results]
    rank = len(call.sizes(operand))
    chosen = call.arguments.get("dim", call.arguments.get("dims", -1))
    dims = [chosen] if isinstance(chosen, int) else list(chosen or range(rank))
    nonlinear = operand_layout.scale and call.name not in LINEAR_SCANS
    differs = operand_layout.differs or (SCALES if nonlinear else "")
    if operand_layout.dim in [dim % rank for dim in dims]:
        differs = differs or ALONG
    return [replace(operand_layout, differs=differs, is_zero=False) for _ in call.results]


def softmax_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of a softmax, which is linear in the incoming gradient."""
    grad = call.whole(call.first())
    output = call.whole(call.arguments["output"])
    split_layout = grad if grad.is_split else output
    rank = len(call.sizes(call.first()))
    differs = ALONG if split_layout.dim == int(call.arguments["dim"]) % rank else ""
    return [replace(split_layout, scale=grad.scale, differs=split_layout.differs or differs)]


def band(call: Call) -> list[Layout]:
    """Return the layout of ``tril`` and ``triu``, which compare the last two indices."""
    operand_layout, rank = call.layout(call.first()), call.rank()
    return [
        replace(operand_layout, differs=operand_layout.differs or BAND)
        if operand_layout.dim >= rank - 2 and operand_layout.is_split
        else operand_layout
    ]


def pad(call: Call) -> list[Layout]:
    """Return the layout of a padded or cropped tensor."""
    operand, rank = call.first(), call.rank()
    value = call.arguments.get("value")
    operand_layout = call.layout(operand)
    if value and operand_layout.is_partial and operand_layout.scale != 1:
        # The padding would be summed over processes; it keeps its value only in a mean.
        operand_layout = call.whole(operand)
    widths = call.arguments.get("pad", call.arguments.get("padding"))
    layout = replace(operand_layout, is_zero=operand_layout.is_zero and not value)
    if not operand_layout.is_split:
        return [layout]
    differs = SCALES if value and operand_layout.scale else ""
    if _is_padded(widths, rank - 1 - operand_layout.dim):
        return [replace(layout, outer=1, differs=operand_layout.differs or PADDED)]
    return [replace(layout, differs=operand_layout.differs or differs)]


def _is_padded(widths: object, from_the_end: int) -> bool:
    """Return whether a dimension, counted from the last one, changes its length."""
    pad_widths = list(widths) if isinstance(widths, Sequence) else []
    return any(width != 0 for width in pad_widths[2 * from_the_end : 2 * from_the_end + 2])


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
    """Return the layouts of an operator that combines elements of operand 0 along `joined`."""
    operand_layout = call.layout(call.first())
    if operand_layout.dim not in joined:
        return per_example(call)
    for operand in call.operands:
        call.whole(operand)
    differs = operand_layout.differs or ALONG
    return [
        replace(
            operand_layout, dim=min(operand_layout.dim, len(sizes) - 1), outer=1, differs=differs
        )
        if sizes
        else Layout()
        for sizes in call.results
    ]
