"""Sums and products of layouts: what rules of operators are made of."""

from collections.abc import Sequence
from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL

__all__ = ["PAIRS", "SCALES", "added", "combined", "multiplied", "unlinear"]

PAIRS = "pairs examples with examples: a process has its own ones only"
SCALES = "joins values that depend on the number of examples in different ways"


def combined(layouts: Sequence[Layout]) -> Layout:
    """Return where the batch is in a result of all of these, none of them partial."""
    split = [layout for layout in layouts if layout.is_split]
    if not split:
        return Layout()
    where = {(layout.dim, layout.outer): None for layout in split}
    return Layout(split[0].dim, split[0].outer, differs=PAIRS if len(where) > 1 else "")


def unlinear(call: Call, values: Sequence[object], rank: int) -> Layout:
    """Return the layout of a function that is not linear in `values`, broadcast to `rank`."""
    layouts = [call.aligned(value, rank, call.whole(value)) for value in values]
    found = combined(layouts)
    if any(layout.scale for layout in layouts if not layout.is_zero):
        return replace(found, differs=found.differs or SCALES)
    return found


def added(call: Call, values: Sequence[object], rank: int) -> Layout:
    """Return the layout of a sum, or of any choice, of `values`, broadcast to `rank`.

    A replicated value is as good as a partial one of the next scale: the sum of N copies is N times
    it. So a mean over the batch plus a number is a mean over the batch.
    """
    layouts = [call.layout(value) for value in values]
    live = [layout for layout in layouts if not layout.is_zero]
    if any(layout.is_partial for layout in live):
        scales = {layout.scale + (not layout.is_partial) for layout in live}
        sums = all(layout.reduction == "sum" for layout in live)
        if len(scales) == 1 and sums and not any(layout.is_split for layout in layouts):
            return Layout(PARTIAL, scale=scales.pop())
        layouts = [call.whole(value) for value in values]
        live = [layout for layout in layouts if not layout.is_zero]
    placed = [call.aligned(v, rank, layout) for v, layout in zip(values, layouts, strict=True)]
    found = combined(placed)
    scales = {layout.scale for layout in live}
    if len(scales) > 1:
        return replace(found, differs=found.differs or SCALES)
    return replace(found, scale=max(scales, default=0), is_zero=not live)


def multiplied(
    call: Call, values: Sequence[object], rank: int, powers: Sequence[int] | None = None
) -> Layout:
    """Return the layout of a product of `values`, each to the power 1 or -1, element by element."""
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
