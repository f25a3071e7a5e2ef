"""Rules of operators that treat each example alone, and what is said of operators without a rule.

The batch is looked for by its size: first in the dimension that it had, then in any.
"""

from dataclasses import replace

from torch import fx

from fxpart.batch_dim.call import Call, Sizes
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL
from fxpart.batch_dim.rules.terms import SCALES

__all__ = ["backward", "located", "per_example", "unknown"]

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
"""Which results of a backward are gradients of parameters: sums over the batch."""


def located(call: Call, of: fx.Node, sizes: Sizes) -> int | None:
    """Return the dimension of a result of those sizes that is the batch dimension of operand."""
    at, before = call.layout(of), call.sizes(of)
    if not 0 <= at.dim < len(before):
        return None
    batch = before[at.dim]
    if at.dim < len(sizes) and sizes[at.dim] == batch:
        return at.dim
    return sizes.index(batch) if batch in sizes else None


def _main(call: Call) -> fx.Node | None:
    return next((node for node in call.operands if call.layout(node).is_split), None)


def per_example(call: Call) -> list[Layout]:
    """Return the layouts of the results of an operator that treats each example alone."""
    main = _main(call)
    if main is None:
        return _unsplit(call)
    for node in call.operands:
        call.whole(node)
    at = call.layout(main)
    live = [call.layout(n) for n in call.operands if not call.layout(n).is_partial]
    differs = SCALES if any(x.scale for x in live) and call.name not in _LINEAR else ""
    return [_result(call, main, at, sizes, differs) for sizes in call.results]


def _unsplit(call: Call) -> list[Layout]:
    """Return the layouts where no operand is split: linear operators keep sums of parts."""
    first = call.layout(call.first()) if call.operands else Layout()
    others = [call.layout(node) for node in call.operands[1:]]
    if first.is_partial and call.name in _LINEAR and not any(x.is_partial for x in others):
        return [first for _ in call.results]
    for node in call.operands:
        call.whole(node)
    return [Layout() for _ in call.results]


def _result(call: Call, main: fx.Node, at: Layout, sizes: Sizes | None, differs: str) -> Layout:
    if sizes is None or 0 in sizes:
        return Layout()
    dim = located(call, main, sizes)
    if dim is None:
        return Layout(PARTIAL, scale=at.scale, differs=differs)
    return Layout(dim, at.outer, at.scale, differs=differs)


def unknown(call: Call) -> list[Layout]:
    """Return what sizes alone say of an operator without a rule, see `BatchDimAnalyzer`."""
    call.by_size = True
    return per_example(call)


def backward(call: Call) -> list[Layout]:
    """Return the layouts of a backward: as the gradient that it is given, or partial."""
    grad = call.first()
    if call.layout(grad).is_partial and not any(call.layout(n).is_split for n in call.operands):
        return [call.layout(grad) for _ in call.results]
    at = call.whole(grad)
    known = PARAMETERS.get(call.name)
    main = grad if at.is_split else _main(call)
    found = []
    for index, sizes in enumerate(call.results):
        if sizes is None or main is None:
            found.append(Layout())
        elif known is not None and index in known:
            found.append(Layout(PARTIAL, scale=at.scale))
        else:
            one = _result(call, main, call.layout(main), sizes, "")
            found.append(replace(one, scale=at.scale))
    call.by_size = known is None and any(layout.is_partial for layout in found)
    return found
