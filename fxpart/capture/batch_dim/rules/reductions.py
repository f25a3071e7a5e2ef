"""Rules for reductions, losses, batch normalization and dropout."""

from dataclasses import replace

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.layout import PARTIAL, Layout
from fxpart.capture.batch_dim.rules.factories import RANDOM
from fxpart.capture.batch_dim.rules.per_example import SCALES, backward, per_example
from fxpart.capture.batch_dim.rules.pointwise import same

__all__ = [
    "REDUCTIONS",
    "batch_norm",
    "batch_norm_backward",
    "counted",
    "dropout",
    "loss",
    "loss_backward",
    "reduction",
]

NO_SUM = "over the batch, is not made of what processes have of it alone"
STATISTICS = "is normalized by the statistics of one process's own examples"

_SUMS = {"sum": 0, "nansum": 0, "mean": 1, "nanmean": 1}
"""Reductions by summation, and the scale of their parts."""
_COUNTS = frozenset({"count_nonzero"})
_EXTREMES = {"amax": "max", "max": "max", "any": "max", "amin": "min", "min": "min", "all": "min"}
_OTHERS = frozenset(
    {"prod", "var", "std", "var_mean", "std_mean", "argmax", "argmin", "logsumexp", "median",
     "linalg_vector_norm", "norm", "mode", "aminmax"}
)  # fmt: skip
REDUCTIONS = frozenset(_SUMS) | _COUNTS | frozenset(_EXTREMES) | _OTHERS
"""Names of the operators handled by `reduction`."""
_NONE, _MEAN = 0, 1
_MODES = {"none": _NONE, "mean": _MEAN, "sum": 2}


def _dims(call: Call, rank: int) -> list[int]:
    dims = call.arguments.get("dim")
    if isinstance(dims, int):
        return [dims % max(rank, 1)]
    return [dim % rank for dim in dims] if dims else list(range(rank))


def reduction(call: Call) -> list[Layout]:
    """Return the layout of a reduction over some dimensions, or all."""
    operand = call.first()
    is_sum = call.name in _SUMS
    operand_layout = call.layout(operand) if is_sum else call.whole(operand)
    if not operand_layout.is_split:
        keeps = not operand_layout.is_partial or operand_layout.reduction == "sum"
        return [operand_layout if keeps else call.whole(operand) for _ in call.results]
    rank = len(call.sizes(operand))
    dims = _dims(call, rank)
    if operand_layout.dim in dims:
        return [_over_the_batch(call, operand_layout, index) for index in range(len(call.results))]
    keeps_dims = call.arguments.get("keepdim", False)
    dim = (
        operand_layout.dim
        if keeps_dims
        else operand_layout.dim - sum(other < operand_layout.dim for other in dims)
    )
    differs = SCALES if operand_layout.scale and not is_sum else ""
    return [
        replace(operand_layout, dim=dim, differs=operand_layout.differs or differs)
        for _ in call.results
    ]


def _over_the_batch(call: Call, layout: Layout, index: int) -> Layout:
    if call.name in _SUMS:
        return Layout(PARTIAL, scale=layout.scale + _SUMS[call.name])
    if call.name in _COUNTS:
        return Layout(PARTIAL)
    if call.name in _EXTREMES and index == 0:
        return Layout(PARTIAL, reduction=_EXTREMES[call.name])
    return Layout(PARTIAL, differs=f"{call.name} {NO_SUM}")


def counted(call: Call) -> list[Layout]:
    """Return the layout of a histogram, whose counts are summed."""
    operand_layout = call.whole(call.first())
    return [Layout(PARTIAL) if operand_layout.is_split else Layout()]


# Losses: a mean over the batch is partial with scale 1, a sum with scale 0.


def _mode(call: Call) -> int:
    mode = call.arguments.get("reduction", _MEAN)
    return _MODES[mode] if isinstance(mode, str) else int(mode)


def loss(call: Call) -> list[Layout]:
    """Return the layouts of a loss, and of the sum of weights also returned by some losses.

    A mean is over the targets that count. Each process is assumed to have equally many, as always
    when gradients of processes are averaged.
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
    """Return the layout of the gradient with respect to the operand of the loss.

    The sum of weights is read without all-reduce, as a process divides by its own sum.
    """
    grad = call.whole(call.first())
    target = call.arguments.get("self", call.operands[1])
    target_layout = call.whole(target)
    mean = 1 if _mode(call) == _MEAN and target_layout.is_split else 0
    return [replace(target_layout, scale=grad.scale + mean) for _ in call.results]


# Batch normalization and dropout.


def _trains(call: Call) -> bool:
    named = ("training", "train")
    return bool(next((call.arguments[name] for name in named if name in call.arguments), False))


def batch_norm(call: Call) -> list[Layout]:
    """Return the layouts of a batch normalization, whose statistics differ in training."""
    layouts = per_example(call)
    if not layouts[0].is_split:
        return layouts
    first = replace(layouts[0], dim=layouts[0].dim)
    if not _trains(call):
        return [first, *(Layout() for _ in layouts[1:])]
    mean, deviation = Layout(PARTIAL, scale=1), Layout(PARTIAL, differs=STATISTICS)
    return [replace(first, differs=STATISTICS), mean, deviation, Layout(), Layout()][: len(layouts)]


def batch_norm_backward(call: Call) -> list[Layout]:
    """Return the layouts of its gradients; saved statistics are read without all-reduce."""
    saved = [call.arguments.get(name) for name in ("save_mean", "save_invstd")]
    layouts = backward(call)
    call.reduced[:] = [node for node in call.reduced if node not in saved]
    if not _trains(call):
        return layouts
    return [
        replace(x, differs=STATISTICS) if sizes else x
        for x, sizes in zip(layouts, call.results, strict=True)
    ]


def dropout(call: Call) -> list[Layout]:
    """Return the layouts of a dropout, the identity outside training or with probability 0."""
    trains = call.arguments.get("train", call.arguments.get("training", True))
    if not trains or call.arguments.get("p") == 0:
        return [*same(call), *(Layout() for _ in call.results[1:])]
    layouts = per_example(call)
    return [replace(x, differs=RANDOM) if x.is_split else x for x in layouts]
