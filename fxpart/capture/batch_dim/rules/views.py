"""Rules of operators that only move elements, and of their gradients."""

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
    """Return the layouts after a view; a value that is not split stays as it is."""
    operand = call.first()
    at = call.layout(operand)
    if not at.is_split:
        return [at for _ in call.results]
    before, after = call.sizes(operand), [sizes or () for sizes in call.results]
    positions = moved(call.name, call.arguments, before, after, Moved(at.dim, at.outer))
    return [
        _lost(call, at, result)
        if to is None or _is_fixed(call, before, after[result], at.dim, to.dim)
        else replace(at, dim=to.dim, outer=to.outer)
        for result, to in enumerate(positions)
    ]


def _is_fixed(call: Call, before: Sizes, after: Sizes, source: int, dim: int) -> bool:
    """Return whether a reshape makes equally many groups of any number of examples.

    Then the size of `dim` is fixed. Where sizes are numbers, one that the batch does not divide
    counts as fixed if another dimension is inferred (-1), or if no dimension has the batch's
    stride any more.
    """
    size = after[dim] if dim < len(after) else 1
    if call.name not in RESHAPES or not isinstance(size, int) or call.batch.was_seen(size):
        return False
    if not isinstance(before[source], int):
        return True
    sizes: list[object] = call.arguments.get("size", call.arguments.get("shape", []))
    rest = -1 in sizes and sizes[dim] != -1
    return not call.batch.divides(size) and (rest or strides(before)[source] not in strides(after))


def _lost(call: Call, at: Layout, result: int) -> Layout:
    if call.name in {"select", "unbind", "squeeze"}:
        return replace(at, dim=REPLICATED, outer=1, differs=at.differs or SOME_EXAMPLES)
    if call.name in {"slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split"}:
        return replace(at, outer=1, differs=at.differs or SOME_EXAMPLES)
    before, after = call.sizes(call.first()), call.results[result] or ()
    dim = overlapping_dim(before, after, Moved(at.dim, at.outer))
    return replace(at, dim=dim or 0, outer=1, differs=at.differs or MIXED)


def repeated(call: Call) -> list[Layout]:
    """Return the layout of a tensor that is repeated, possibly for each example.

    A value that is already split and repeated for each example again pairs examples. With numbers
    as sizes that cannot be told from another dimension of the same size, which is assumed instead.
    """
    operand = call.first()
    before, after = call.sizes(operand), call.results[0] or ()
    new = len(after) - len(before)
    grown = [
        dim
        for dim, size in enumerate(after)
        if (dim < new or before[dim - new] != size) and call.batch.is_in(size)
    ]
    if not call.layout(operand).is_split:
        return [replace(call.whole(operand), dim=grown[0])] if grown else view(call)
    layouts = view(call)
    others = [dim for dim in grown if dim != layouts[0].dim and not isinstance(after[dim], int)]
    return [replace(x, differs=x.differs or PAIRS) for x in layouts] if others else layouts


def item(call: Call) -> list[Layout]:
    """Return the layout of an item of a tuple."""
    source, index = call.node.args[0], call.node.args[1]
    if call.node.args[0] not in call.state or not isinstance(index, int):
        return [Layout()]
    return [call.state[source][index]]  # type: ignore[index]


def cat(call: Call) -> list[Layout]:
    """Return the layout of concatenated tensors; along the batch, it repeats for each of them."""
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
    same = {(x.dim, x.outer, x.scale) for x in split if not x.is_zero}
    if along != first.dim and len(same) <= 1:
        return [replace(first, is_zero=all(x.is_zero for x in layouts))]
    if len(same) > 1 or len(split) < len(layouts):
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
    at = call.layout(call.first())
    # Gathered along a dimension that is there, or in a new first one.
    stays = len(call.sizes(call.first())) == call.rank()
    return [replace(at, dim=at.dim + 1) if at.is_split and not stays else at]


def scattered(call: Call) -> list[Layout]:
    """Return the layout of this device's part of a sum, of parts in a first dimension or along."""
    at = call.layout(call.first())
    stays = len(call.sizes(call.first())) == call.rank()
    return [replace(at, dim=at.dim - 1) if at.is_split and not stays else at]


def select_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of `select`, which restores the dimension."""
    at = call.layout(call.first())
    along = int(call.arguments["dim"]) % call.rank()
    return [replace(at, dim=at.dim + (along <= at.dim)) if at.is_split else at]


def slice_backward(call: Call) -> list[Layout]:
    """Return the layout of the gradient of a slice, with zeros outside of it."""
    operand = call.first()
    at, sizes = call.layout(operand), call.results[0] or ()
    if not at.is_split or int(call.arguments["dim"]) % call.rank() != at.dim:
        return [at]
    # Outside are whole repeats of the batch, or some examples.
    outer = quotient(product((sizes[at.dim], at.outer)), call.sizes(operand)[at.dim])
    if outer is None:
        return [replace(at, outer=1, differs=at.differs or SOME_EXAMPLES)]
    return [replace(at, outer=outer)]
