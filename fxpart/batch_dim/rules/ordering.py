"""Rules of operators that work along one dimension: sorts, scans, softmax."""

from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.rules.terms import SCALES

__all__ = ["ALONG", "LINEAR_SCANS", "along", "softmax_backward"]

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
