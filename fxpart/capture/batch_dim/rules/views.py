"""Rules for operators that only move elements, and for their gradients."""

from dataclasses import replace

from fxpart.capture.batch_dim.call import Call, Sizes
from fxpart.capture.batch_dim.extent import product, quotient, strides
from fxpart.capture.batch_dim.layout import REPLICATED, Layout
from fxpart.capture.batch_dim.rules.per_example import PAIRS
from fxpart.capture.batch_dim.views import RESHAPES, Moved, moved, overlapping_dim

__all__ = [
    "cat",
    "gathered",
    "item",
    "repeated",
    "scattered",
    "select_backward",
    "slice_backward",
    "stack",
    "view",
]

SOME_EXAMPLES = "takes some examples of the batch: a process has its own ones only"
MIXED = "mixes the batch with other dimensions: a part of the examples is no part of a dimension"


def view(call: Call) -> list[Layout]:
    """Return the layouts after a view; a value that is not split keeps its layout."""
    operand = call.first()
    operand_layout = call.layout(operand)
    if not operand_layout.is_split:
        return [operand_layout for _ in call.results]
    operand_sizes, result_sizes = call.sizes(operand), [sizes or () for sizes in call.results]
    positions = moved(
        call.name,
        call.arguments,
        operand_sizes,
        result_sizes,
        Moved(operand_layout.dim, operand_layout.outer),
    )
    return [
        _lost(call, operand_layout, result)
        if target is None
        or _is_fixed(call, operand_sizes, result_sizes[result], operand_layout.dim, target.dim)
        else replace(operand_layout, dim=target.dim, outer=target.outer)
        for result, target in enumerate(positions)
    ]


def _is_fixed(call: Call, before: Sizes, after: Sizes, source: int, dim: int) -> bool:
    """Return whether a reshape makes the same number of groups from any number of examples.

    Then the size of `dim` is fixed. If sizes are numbers, one that is not a multiple of the batch
    counts as fixed if another dimension is inferred (-1), or if no dimension has the batch's stride
    any more.
    """
    size = after[dim] if dim < len(after) else 1
    if call.name not in RESHAPES or not isinstance(size, int) or call.batch.was_seen(size):
        return False
    if not isinstance(before[source], int):
        return True
    sizes: list[object] = call.arguments.get("size", call.arguments.get("shape", []))
    is_inferred = -1 in sizes and sizes[dim] != -1
    return not call.batch.divides(size) and (
        is_inferred or strides(before)[source] not in strides(after)
    )


def _lost(call: Call, layout: Layout, result: int) -> Layout:
    if call.name in {"select", "unbind", "squeeze"}:
        return replace(layout, dim=REPLICATED, outer=1, differs=layout.differs or SOME_EXAMPLES)
    if call.name in {"slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split"}:
        return replace(layout, outer=1, differs=layout.differs or SOME_EXAMPLES)
    operand_sizes, result_sizes = call.sizes(call.first()), call.results[result] or ()
    dim = overlapping_dim(operand_sizes, result_sizes, Moved(layout.dim, layout.outer))
    return replace(layout, dim=dim or 0, outer=1, differs=layout.differs or MIXED)


def repeated(call: Call) -> list[Layout]:
    """Return the layout of a repeated tensor, possibly once for each example.

    Repeating an already split value for each example pairs examples. With numeric sizes this cannot
    be distinguished from another dimension of the same size, which is assumed instead.
    """
    operand = call.first()
    operand_sizes, result_sizes = call.sizes(operand), call.results[0] or ()
    new = len(result_sizes) - len(operand_sizes)
    grown = [
        dim
        for dim, size in enumerate(result_sizes)
        if (dim < new or operand_sizes[dim - new] != size) and call.batch.is_in(size)
    ]
    if not call.layout(operand).is_split:
        return [replace(call.whole(operand), dim=grown[0])] if grown else view(call)
    layouts = view(call)
    paired_dims = [
        dim for dim in grown if dim != layouts[0].dim and not isinstance(result_sizes[dim], int)
    ]
    return [replace(x, differs=x.differs or PAIRS) for x in layouts] if paired_dims else layouts


def item(call: Call) -> list[Layout]:
    """Return the layout of an item of a tuple."""
    source, index = call.node.args[0], call.node.args[1]
    if call.node.args[0] not in call.state or not isinstance(index, int):
        return [Layout()]
    return [call.state[source][index]]  # type: ignore[index]


def cat(call: Call) -> list[Layout]:
    """Return the layout of concatenated tensors; concatenation along the batch repeats it."""
    tensors = call.arguments["tensors"]
    layouts = [call.layout(tensor) for tensor in tensors]
    if (
        any(layout.is_partial for layout in layouts)
        and len({(layout.dim, layout.scale) for layout in layouts if not layout.is_zero}) > 1
    ):
        layouts = [call.whole(tensor) for tensor in tensors]
    split = [layout for layout in layouts if layout.is_split]
    if not split:
        return [layouts[0]]
    rank, first = call.rank(), split[0]
    along = int(call.arguments.get("dim") or 0) % rank
    positions = {(x.dim, x.outer, x.scale) for x in split if not x.is_zero}
    if along != first.dim and len(positions) <= 1:
        return [replace(first, is_zero=all(x.is_zero for x in layouts))]
    if len(positions) > 1 or len(split) < len(layouts):
        return [replace(first, outer=1, differs=first.differs or SOME_EXAMPLES)]
    outer = first.outer
    for layout in split[1:]:
        outer = outer + layout.outer
    return [replace(first, outer=outer)]


def stack(call: Call) -> list[Layout]:
    """Return the layout of tensors along a new dimension."""
    tensors, rank = call.arguments["tensors"], call.rank()
    along = int(call.arguments.get("dim") or 0) % rank
    layouts = [call.layout(tensor) for tensor in tensors]
    if len({(layout.dim, layout.scale) for layout in layouts}) > 1:
        layouts = [call.whole(tensor) for tensor in tensors]
    first = next((layout for layout in layouts if layout.is_split), layouts[0])
    if not first.is_split:
        return [first]
    return [replace(first, dim=first.dim + (along <= first.dim))]


def gathered(call: Call) -> list[Layout]:
    """Return the layout of the parts of a tensor-parallel group, in a new first dimension."""
    operand_layout = call.layout(call.first())
    # Gathered along an existing dimension, or in a new first one.
    keeps_rank = len(call.sizes(call.first())) == call.rank()
    return [
        replace(operand_layout, dim=operand_layout.dim + 1)
        if operand_layout.is_split and not keeps_rank
        else operand_layout
    ]


def scattered(call: Call) -> list[Layout]:
    """Return the layout of this device's part of a sum, of parts in a first dimension or along."""
    operand_layout = call.layout(call.first())
    keeps_rank = len(call.sizes(call.first())) == call.rank()
    return [
        replace(operand_layout, dim=operand_layout.dim - 1)
        if operand_layout.is_split and not keeps_rank
        else operand_layout
    ]


def select_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of `select`, which restores the dimension."""
    operand_layout = call.layout(call.first())
    along = int(call.arguments["dim"]) % call.rank()
    return [
        replace(operand_layout, dim=operand_layout.dim + (along <= operand_layout.dim))
        if operand_layout.is_split
        else operand_layout
    ]


def slice_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of a slice, with zeros outside the slice."""
    operand = call.first()
    operand_layout, sizes = call.layout(operand), call.results[0] or ()
    if (
        not operand_layout.is_split
        or int(call.arguments["dim"]) % call.rank() != operand_layout.dim
    ):
        return [operand_layout]
    # Outside are whole repeats of the batch, or some examples.
    outer = quotient(
        product((sizes[operand_layout.dim], operand_layout.outer)),
        call.sizes(operand)[operand_layout.dim],
    )
    if outer is None:
        return [replace(operand_layout, outer=1, differs=operand_layout.differs or SOME_EXAMPLES)]
    return [replace(operand_layout, outer=outer)]
