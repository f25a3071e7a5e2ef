"""Rules for operators that read or write at indices."""

from dataclasses import replace

from torch import fx

from fxpart.capture.batch_dim.call import Call
from fxpart.capture.batch_dim.extent import product
from fxpart.capture.batch_dim.layout import PARTIAL, REPLICATED, Layout
from fxpart.capture.batch_dim.rules.factories import POSITIONS
from fxpart.capture.batch_dim.rules.per_example import PAIRS, combined, per_example
from fxpart.capture.batch_dim.rules.views import SOME_EXAMPLES

__all__ = [
    "embedding",
    "embedding_bag",
    "gather",
    "index",
    "index_put",
    "index_select",
]


def embedding(call: Call) -> list[Layout]:
    """Return the layout of table rows, split like the indices."""
    table, indices = call.arguments["weight"], call.arguments["indices"]
    rows, index_layout = call.layout(table), call.whole(indices)
    if index_layout.is_split and rows.is_partial:
        rows = call.whole(table)
    if rows.is_split:
        return [replace(rows, dim=call.rank() - 1 if rows.dim else 0, differs=SOME_EXAMPLES)]
    return [index_layout if index_layout.is_split else rows]


def embedding_bag(call: Call) -> list[Layout]:
    """Return the layouts of bags of embeddings, split like the bags.

    Each process needs offsets into its own indices. Further results may be the bag of each index
    and the bag sizes.
    """
    indices, offsets = call.arguments["indices"], call.arguments["offsets"]
    call.whole(call.arguments["weight"])
    index_layout = call.layout(indices)
    if not index_layout.is_split:
        return [Layout() for _ in call.results]
    if isinstance(offsets, fx.Node) and call.layout(offsets).differs == POSITIONS:
        call.apart.append(offsets)
    layouts = [Layout(0)]
    bags = (call.results[0] or (0,))[0]
    for position, sizes in enumerate(call.results[1:], 1):
        if not sizes or sizes[0] == 0:
            layouts.append(Layout())
        else:
            counts = position == 1
            layouts.append(Layout(0, differs=POSITIONS if counts and sizes[0] != bags else ""))
    return layouts


def _at_positions(call: Call, source: fx.Node, dim: int, index: object) -> bool:
    """Return whether `index` counts a process's own examples, matching its part of `source`."""
    source_layout = call.layout(source)
    if (
        source_layout.is_split
        and source_layout.dim == dim
        and call.layout(index).differs == POSITIONS
    ):
        call.apart.append(index)  # type: ignore[arg-type]
        return True
    return False


def index(call: Call) -> list[Layout]:
    """Return the layout of ``x[i, :, j]``: indices are broadcast and replace their dimensions."""
    source = call.arguments["self"]
    indices = list(call.arguments["indices"])
    indexed_dims = [dim for dim, item in enumerate(indices) if item is not None]
    rank = call.rank()
    wide = max(len(call.sizes(indices[dim])) for dim in indexed_dims)
    first = (
        indexed_dims[0] if indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1)) else 0
    )
    source_layout = call.layout(source)
    if source_layout.is_partial and any(call.layout(indices[dim]).is_split for dim in indexed_dims):
        source_layout = call.whole(source)
    by_index = [call.aligned(indices[d], wide, call.whole(indices[d])) for d in indexed_dims]
    split = combined(by_index)
    if not source_layout.is_split:
        return [replace(split, dim=split.dim + first) if split.is_split else source_layout]
    if source_layout.dim in indexed_dims:
        if (
            _at_positions(call, source, source_layout.dim, indices[source_layout.dim])
            and split.is_split
        ):
            return [replace(split, dim=split.dim + first, scale=source_layout.scale)]
        return [replace(source_layout, dim=min(first, max(rank - 1, 0)), differs=SOME_EXAMPLES)]
    remaining_dim = source_layout.dim - sum(dim < source_layout.dim for dim in indexed_dims)
    dim = remaining_dim + wide if remaining_dim >= first else remaining_dim
    differs = PAIRS if split.is_split else ""
    return [replace(source_layout, dim=dim, differs=differs)]


def index_put(call: Call) -> list[Layout]:
    """Return the layout of a tensor into which values are written, or added, at indices."""
    source, values = call.arguments["self"], call.arguments["values"]
    indices = list(call.arguments["indices"])
    indexed_dims = [dim for dim, item in enumerate(indices) if item is not None]
    source_layout, new = call.layout(source), call.whole(values)
    if source_layout.is_split:
        scale = (
            new.scale if source_layout.is_zero or call.name == "empty_like" else source_layout.scale
        )
        differs = ""
        if source_layout.dim in indexed_dims and not _at_positions(
            call, source, source_layout.dim, indices[source_layout.dim]
        ):
            differs = SOME_EXAMPLES
        return [replace(source_layout, scale=scale, is_zero=False, differs=differs)]
    split = new.is_split or any(call.layout(indices[dim]).is_split for dim in indexed_dims)
    if not split:
        return [replace(call.whole(source), is_zero=False, scale=new.scale)]
    if call.arguments.get("accumulate") and source_layout.is_zero:
        return [Layout(PARTIAL, scale=new.scale)]
    return [Layout(PARTIAL, scale=new.scale, differs=SOME_EXAMPLES)]


def index_select(call: Call) -> list[Layout]:
    """Return the layout of slices of a tensor at indices along one dimension."""
    source, picks = call.arguments["self"], call.arguments["index"]
    along = int(call.arguments["dim"]) % max(len(call.sizes(source)), 1)
    source_layout, pick_layout = call.layout(source), call.whole(picks)
    if source_layout.is_split and source_layout.dim == along:
        fits = _at_positions(call, source, along, picks)
        return [source_layout if fits else replace(source_layout, outer=1, differs=SOME_EXAMPLES)]
    if not pick_layout.is_split:
        return [source_layout]
    source_layout = call.whole(source)
    return [replace(pick_layout, dim=along, differs=PAIRS if source_layout.is_split else "")]


def _at_the_same(call: Call, source: fx.Node, layout: Layout) -> Layout:
    """Return the layout if indices and written values are the same on every process.

    They address positions within each process's examples, or its first ones.
    """
    if call.name == "gather":
        return (
            replace(layout, dim=REPLICATED, outer=1, differs=SOME_EXAMPLES)
            if layout.is_split
            else layout
        )
    if layout.is_split:
        return replace(layout, outer=1, is_zero=False, differs=SOME_EXAMPLES)
    return replace(call.whole(source), is_zero=False)


def gather(call: Call) -> list[Layout]:
    """Return the layout of ``gather`` and ``scatter``, whose indices align with the tensor.

    Both are split alike, or the tensor has the same elements for every example.
    """
    source, picks = call.arguments["self"], call.arguments["index"]
    along = int(call.arguments["dim"]) % max(len(call.sizes(source)), 1)
    source_layout, pick_layout = call.layout(source), call.whole(picks)
    source_value = call.arguments.get("src")
    new = call.whole(source_value) if source_value is not None else Layout()
    if not pick_layout.is_split and not new.is_split:
        return [_at_the_same(call, source, source_layout)]
    source_layout = call.whole(source)
    if call.name == "gather":
        fits = (source_layout.is_split and source_layout.dim == pick_layout.dim != along) or (
            not source_layout.is_split and pick_layout.dim == along
        )
        return [
            replace(pick_layout, scale=source_layout.scale, differs="" if fits else SOME_EXAMPLES)
        ]
    if source_layout.is_split and source_layout.dim != along:
        scale = new.scale if source_layout.is_zero else source_layout.scale
        differs = "" if new.scale == scale or source_value is None else PAIRS
        return [replace(source_layout, is_zero=False, scale=scale, differs=differs)]
    adds = call.name == "scatter_add" and source_layout.is_zero and product(call.sizes(source)) != 0
    if adds and not source_layout.is_split and pick_layout.dim == along:
        return [Layout(PARTIAL, scale=new.scale)]
    # Called for its all-reduces.
    per_example(call)
    return [replace(pick_layout, dim=max(pick_layout.dim, 0), differs=SOME_EXAMPLES)]
