"""Rules for operators that create tensors from sizes, and for numbers."""

from dataclasses import replace

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxpart.capture.batch_dim.call import Call, base_name
from fxpart.capture.batch_dim.extent import extent
from fxpart.capture.batch_dim.layout import Layout

__all__ = ["POSITIONS", "RANDOM", "constant", "number", "positions", "random"]

POSITIONS = "counts the examples: a process counts its own ones from 0"
RANDOM = "is drawn at random: a process draws for its own examples"
_ZEROS = frozenset({"zeros", "new_zeros", "zeros_like"})


def _split(call: Call) -> Layout:
    """Return the position of the batch in a new tensor: that of the operand, or by its size."""
    sizes = call.results[0] or ()
    split = [operand for operand in call.operands if call.layout(operand).is_split]
    for operand in split:
        source_layout, source_sizes = call.layout(operand), call.sizes(operand)
        if (
            source_layout.dim < min(len(source_sizes), len(sizes))
            and sizes[source_layout.dim] == source_sizes[source_layout.dim]
        ):
            return Layout(source_layout.dim, source_layout.outer)
    grows = call.batch.was_seen if split else call.batch.is_in
    dim = next((dim for dim, size in enumerate(sizes) if grows(size)), None)
    if dim is None:
        return Layout()
    call.by_size = isinstance(sizes[dim], int)
    return Layout(dim)


def constant(call: Call) -> list[Layout]:
    """Return the layout of a tensor filled with one number, of which only the shape matters."""
    call.apart.extend(call.operands)
    value = call.arguments.get("fill_value", call.arguments.get("s"))
    is_zero = call.name in _ZEROS or (isinstance(value, int | float) and value == 0)
    layout = replace(_split(call), is_zero=is_zero)
    filled = call.layout(value)
    if filled.is_partial:
        filled = call.whole(value)
    return [replace(layout, scale=filled.scale)]


def positions(call: Call) -> list[Layout]:
    """Return the layout of ascending numbers, which start at 0 on each process."""
    layout = Layout(0) if _numbers_rows(call) else _split(call)
    return [replace(layout, differs=POSITIONS) if layout.is_split else layout]


def _numbers_rows(call: Call) -> bool:
    """Return whether the numbers are written at equally many split indices, inverting an order."""
    for user in call.node.users:
        if base_name(user) == "index_put" and user.args[2] is call.node:
            indices = [n for n in tree_leaves(user.args[1]) if isinstance(n, fx.Node)]
            if any(call.layout(n).is_split and call.sizes(n) == call.results[0] for n in indices):
                return True
    return False


def random(call: Call) -> list[Layout]:
    """Return the layout of random numbers, which differ between processes if split."""
    call.apart.extend(call.operands)
    source_layout = call.layout(call.first()) if call.operands else Layout()
    split = (
        [replace(source_layout, scale=0, is_zero=False)]
        if source_layout.is_split
        else [_split(call)]
    )
    return [replace(x, differs=RANDOM) if x.is_split else x for x in split * len(call.results)]


def number(call: Call) -> list[Layout]:
    """Return the layout of a number; one that grows with the batch is smaller on each process."""
    value = call.node.meta.get("val")
    if isinstance(value, torch.SymInt):
        power = call.batch.power_of(extent(value))
        differs = "is a size that is not in proportion to the batch" if power is None else ""
        return [Layout(scale=-(power or 0), differs=differs)]
    if value is None:
        # A check, such as an assertion.
        call.apart.extend(call.operands)
        return [Layout()]
    for operand in call.operands:
        call.whole(operand)
    if any(call.layout(operand).is_split for operand in call.operands):
        return [Layout(differs="is a number read from one process's own examples")]
    return [Layout()]
