"""Rules of losses: a mean over the batch is partial with scale 1, a sum with scale 0."""

from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL
from fxpart.batch_dim.rules.per_example import per_example

__all__ = ["loss", "loss_backward"]

_NONE, _MEAN = 0, 1
_MODES = {"none": _NONE, "mean": _MEAN, "sum": 2}


def _mode(call: Call) -> int:
    asked = call.arguments.get("reduction", _MEAN)
    return _MODES[asked] if isinstance(asked, str) else int(asked)


def loss(call: Call) -> list[Layout]:
    """Return the layouts of a loss, and of the sum of weights that some return beside it.

    A mean is taken of the targets that count; that each process has as many of them is assumed, as
    everywhere that gradients of processes are averaged.
    """
    mode = _mode(call)
    if mode == _NONE:
        return [*per_example(call)[:1], *(Layout() for _ in call.results[1:])]
    split = [call.whole(operand).is_split for operand in call.operands]
    if not any(split):
        return [Layout() for _ in call.results]
    first = Layout(PARTIAL, scale=1 if mode == _MEAN else 0)
    return [first, *(Layout(PARTIAL) for _ in call.results[1:])]


def loss_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient by what the loss was taken of.

    The sum of weights is read as each process has it: that is what a step of its own divides by.
    """
    grad = call.whole(call.first())
    target = call.arguments.get("self", call.operands[1])
    at = call.whole(target)
    mean = 1 if _mode(call) == _MEAN and at.is_split else 0
    return [replace(at, scale=grad.scale + mean) for _ in call.results]
