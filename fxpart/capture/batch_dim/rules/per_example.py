"""Rules for operators that treat examples independently, and for operators without a rule.

The batch is located by its size: first in the dimension of the operand, then in any.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from fxpart.capture.batch_dim.call import Call, Sizes
from fxpart.capture.batch_dim.layout import PARTIAL, Layout

__all__ = [
    "PAIRS",
    "SCALES",
    "added",
    "backward",
    "combined",
    "located",
    "multiplied",
    "per_example",
    "unknown",
    "unlinear",
]


PAIRS = "pairs examples with examples: a process has its own ones only"
SCALES = "joins values that depend on the number of examples in different ways"

_LINEAR = frozenset(
    {
        "conv1d", "conv2d", "conv3d", "convolution", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d",
        "upsample_nearest2d", "upsample_bilinear2d", "conv_transpose2d", "col2im", "im2col",
    }
)  # fmt: skip
PARAMETERS = {
    "native_layer_norm_backward": (1, 2),
    "_fused_rms_norm_backward": (1,),
    "native_group_norm_backward": (1, 2),
    "native_batch_norm_backward": (1, 2),
    "batch_norm_backward": (1, 2),
    "cudnn_batch_norm_backward": (1, 2),
    "convolution_backward": (1, 2),
    "linear_backward": (1, 2),
    "embedding_dense_backward": (0,),
    "embedding_backward": (0,),
    "_embedding_bag_backward": (0,),
    "_embedding_bag_dense_backward": (0,),
}
"""Results of a backward that are gradients of parameters, and so sums over the batch."""


# Sums and products of layouts, the building blocks of rules.


def combined(layouts: Sequence[Layout]) -> Layout:
    """Return the position of the batch in a result of several non-partial operands."""
    split = [layout for layout in layouts if layout.is_split]
    if not split:
        return Layout()
    where = {(layout.dim, layout.outer): None for layout in split}
    return Layout(split[0].dim, split[0].outer, differs=PAIRS if len(where) > 1 else "")


def unlinear(call: Call, values: Sequence[object], rank: int) -> Layout:
    """Return the layout of a function that is not linear in `values`, broadcast to `rank`."""
    layouts = [call.aligned(value, rank, call.whole(value)) for value in values]
    layout = combined(layouts)
    if any(term.scale for term in layouts if not term.is_zero):
        return replace(layout, differs=layout.differs or SCALES)
    return layout


def added(call: Call, values: Sequence[object], rank: int) -> Layout:
    """Return the layout of a sum of, or choice between, `values`, broadcast to `rank`.

    A replicated value equals a partial one of the next scale, since the sum of N copies is N times
    the value. So a mean over the batch plus a number is a mean over the batch.
    """
    layouts = [call.layout(value) for value in values]
    live = [term for term in layouts if not term.is_zero]
    if any(term.is_partial for term in live):
        scales = {term.scale + (not term.is_partial) for term in live}
        sums = all(term.reduction == "sum" for term in live)
        if len(scales) == 1 and sums and not any(term.is_split for term in layouts):
            return Layout(PARTIAL, scale=scales.pop())
        layouts = [call.whole(value) for value in values]
        live = [term for term in layouts if not term.is_zero]
    placed = [call.aligned(v, rank, term) for v, term in zip(values, layouts, strict=True)]
    layout = combined(placed)
    scales = {term.scale for term in live}
    if len(scales) > 1:
        return replace(layout, differs=layout.differs or SCALES)
    return replace(layout, scale=max(scales, default=0), is_zero=not live)


def multiplied(
    call: Call, values: Sequence[object], rank: int, powers: Sequence[int] | None = None
) -> Layout:
    """Return the layout of an elementwise product of `values`, each to the power 1 or -1."""
    exponents = [1] * len(values) if powers is None else powers
    layouts = [call.layout(value) for value in values]
    partial = [i for i, layout in enumerate(layouts) if layout.is_partial]
    alone = len(partial) == 1 and not any(layout.is_split for layout in layouts)
    keeps = alone and exponents[partial[0]] == 1 and layouts[partial[0]].reduction == "sum"
    if partial and not keeps:
        layouts = [call.whole(value) for value in values]
    scale = sum(power * layout.scale for power, layout in zip(exponents, layouts, strict=True))
    is_zero = any(layout.is_zero for layout in layouts)
    if partial and keeps:
        return Layout(PARTIAL, scale=scale, is_zero=is_zero)
    placed = [call.aligned(v, rank, layout) for v, layout in zip(values, layouts, strict=True)]
    return replace(combined(placed), scale=scale, is_zero=is_zero)


# Rules.


def located(call: Call, operand: fx.Node, sizes: Sizes) -> int | None:
    """Return the dimension of a result of the given `sizes` that has the batch of `operand`."""
    operand_layout, operand_sizes = call.layout(operand), call.sizes(operand)
    if not 0 <= operand_layout.dim < len(operand_sizes):
        return None
    batch = operand_sizes[operand_layout.dim]
    if operand_layout.dim < len(sizes) and sizes[operand_layout.dim] == batch:
        return operand_layout.dim
    return sizes.index(batch) if batch in sizes else None


def _main(call: Call) -> fx.Node | None:
    return next((node for node in call.operands if call.layout(node).is_split), None)


def per_example(call: Call) -> list[Layout]:
    """Return the layouts of the results of an operator that treats examples independently."""
    main = _main(call)
    if main is None:
        return _unsplit(call)
    for node in call.operands:
        call.whole(node)
    main_layout = call.layout(main)
    live = [call.layout(n) for n in call.operands if not call.layout(n).is_partial]
    differs = SCALES if any(x.scale for x in live) and call.name not in _LINEAR else ""
    return [_result(call, main, main_layout, sizes, differs) for sizes in call.results]


def _unsplit(call: Call) -> list[Layout]:
    """Return the layouts if no operand is split; linear operators preserve partial sums."""
    first = call.layout(call.first()) if call.operands else Layout()
    other_layouts = [call.layout(node) for node in call.operands[1:]]
    if first.is_partial and call.name in _LINEAR and not any(x.is_partial for x in other_layouts):
        return [first for _ in call.results]
    for node in call.operands:
        call.whole(node)
    return [Layout() for _ in call.results]


def _result(call: Call, main: fx.Node, layout: Layout, sizes: Sizes | None, differs: str) -> Layout:
    if sizes is None or 0 in sizes:
        return Layout()
    dim = located(call, main, sizes)
    if dim is None:
        return Layout(PARTIAL, scale=layout.scale, differs=differs)
    return Layout(dim, layout.outer, layout.scale, differs=differs)


def unknown(call: Call) -> list[Layout]:
    """Return the layouts of an operator without a rule, by sizes alone; see `BatchDimAnalyzer`."""
    call.by_size = True
    return per_example(call)


def backward(call: Call) -> list[Layout]:
    """Return the layouts of a backward: that of the incoming gradient, or partial."""
    grad = call.first()
    if call.layout(grad).is_partial and not any(call.layout(n).is_split for n in call.operands):
        return [call.layout(grad) for _ in call.results]
    grad_layout = call.whole(grad)
    parameter_results = PARAMETERS.get(call.name)
    main = grad if grad_layout.is_split else _main(call)
    layouts = []
    for index, sizes in enumerate(call.results):
        if sizes is None or main is None:
            layouts.append(Layout())
        elif parameter_results is not None and index in parameter_results:
            layouts.append(Layout(PARTIAL, scale=grad_layout.scale))
        else:
            layout = _result(call, main, call.layout(main), sizes, "")
            layouts.append(replace(layout, scale=grad_layout.scale))
    call.by_size = parameter_results is None and any(result.is_partial for result in layouts)
    return layouts
