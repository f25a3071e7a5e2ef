"""`moved`: find the position of the batch after an operator that only moves elements.

A dimension along which the batch is split may be larger than the batch: after a view of ``(5, B)``
as ``(5 * B,)`` the batch repeats five times, and `outer` is 5. A reshape is tracked by strides: in
a dense tensor, the batch of input dimension ``d`` repeats every ``T`` elements, and is in the
output dimension whose stride is below ``T`` and whose extent covers ``T``. So there is no need to
guess which dimensions were joined or split, and sizes may be symbolic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpart.capture.batch_dim.extent import Extent, extent, product, quotient, strides

__all__ = ["RESHAPES", "VIEWS", "Moved", "moved", "overlapping_dim", "reshaped"]

RESHAPES = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "_reshape_alias",
        "flatten",
        "unflatten",
        "view_as",
        "reshape_as",
        "ravel",
    }
)
_SWAPS = frozenset(
    {"transpose", "t", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "numpy_T", "mT"}
)
_PIECES = frozenset(
    {"slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "tensor_split"}
)
_WIDER = frozenset(
    {"expand", "expand_as", "broadcast_to", "repeat", "tile", "unsqueeze", "squeeze"}
)
VIEWS = RESHAPES | _SWAPS | _PIECES | _WIDER | {"repeat_interleave"}
"""Names of the operators handled by `moved`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The position of the batch in a tensor."""

    dim: int
    outer: Extent = 1
    """Number of repeats of the batch in that dimension."""


def moved(
    name: str,
    arguments: Mapping[str, Any],
    before: Sequence[Extent],
    after: Sequence[Sequence[Extent]],
    position: Moved,
) -> list[Moved | None]:
    """Return the position of the batch in each result of a view; None if a result lacks part of it.

    Args:
        name: name of the operator, in `VIEWS`.
        arguments: arguments of the call, by schema name.
        before: sizes of the operand.
        after: sizes of each result.
        position: position of the batch in the operand.

    """
    if name in RESHAPES:
        return [reshaped(before, sizes, position) for sizes in after]
    if name in _SWAPS:
        return [Moved(_order(name, arguments, len(before)).index(position.dim), position.outer)]
    if name in _PIECES:
        return _pieces(name, arguments, before, after, position)
    if name in {"squeeze", "unsqueeze"}:
        return [_squeezed(name, arguments, before, position)]
    return [_widened(name, arguments, before, after[0], position)]


def reshaped(before: Sequence[Extent], after: Sequence[Extent], position: Moved) -> Moved | None:
    """Return the position of the batch after a reshape; None if no dimension contains its parts."""
    if list(before[: position.dim + 1]) == list(after[: position.dim + 1]):
        return position
    period = _period(before, position)
    for dim, (step, size) in enumerate(zip(strides(after), after, strict=True)):
        inside, outer = quotient(period, step), quotient(product((step, size)), period)
        if inside is not None and inside != 1 and outer is not None and outer != 0:
            return Moved(dim, outer)
    return None


def overlapping_dim(
    before: Sequence[Extent], after: Sequence[Extent], position: Moved
) -> int | None:
    """Return the first output dimension with elements of the batch dimension.

    For reshapes with known sizes that mix the batch with other dimensions. None if sizes are
    symbolic.
    """
    period, low = _period(before, position), strides(before)[position.dim]
    for dim, (step, size) in enumerate(zip(strides(after), after, strict=True)):
        if not all(isinstance(x, int) for x in (period, low, step, size)):
            return None
        if step < period and step * size > low:
            return dim
    return None


def _period(sizes: Sequence[Extent], position: Moved) -> Extent:
    """Return the number of elements after which the batch repeats in a dense tensor."""
    dim_elements = product((strides(sizes)[position.dim], sizes[position.dim]))
    return quotient(dim_elements, position.outer) or dim_elements


def _order(name: str, arguments: Mapping[str, Any], rank: int) -> list[int]:
    """Return the operand dimension behind each dimension of the result."""
    order = list(range(rank))
    if name == "permute":
        return [int(dim) % rank for dim in arguments["dims"]]
    if name in {"movedim", "moveaxis"}:
        sources, targets = _many(arguments["source"]), _many(arguments["destination"])
        order_without_sources = [dim for dim in order if dim not in {s % rank for s in sources}]
        for target, source in sorted(
            (t % rank, s % rank) for t, s in zip(targets, sources, strict=True)
        ):
            order_without_sources.insert(target, source)
        return order_without_sources
    if name == "numpy_T":
        return order[::-1]
    if name in {"t", "mT"}:
        pair = (rank - 2, rank - 1) if rank > 1 else (0, 0)
    else:
        first, second = (value for key, value in arguments.items() if key not in {"self", "input"})
        pair = (first % rank, second % rank)
    order[pair[0]], order[pair[1]] = order[pair[1]], order[pair[0]]
    return order


def _many(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _squeezed(
    name: str, arguments: Mapping[str, Any], before: Sequence[Extent], position: Moved
) -> Moved | None:
    if name == "unsqueeze":
        new = arguments["dim"] % (len(before) + 1)
        return Moved(position.dim + (new <= position.dim), position.outer)
    chosen = arguments.get("dim")
    dims = range(len(before)) if chosen is None else [d % len(before) for d in _many(chosen)]
    removed = [dim for dim in dims if before[dim] == 1]
    if position.dim in removed:
        return None
    return Moved(position.dim - sum(dim < position.dim for dim in removed), position.outer)


def _widened(
    name: str,
    arguments: Mapping[str, Any],
    before: Sequence[Extent],
    after: Sequence[Extent],
    position: Moved,
) -> Moved | None:
    if name == "repeat_interleave":
        # Each example is repeated in place; without `dim` the operand is flattened first.
        if arguments.get("dim") is None:
            return Moved(0, product((*before[: position.dim], position.outer)))
        return position
    dim = position.dim + len(after) - len(before)
    if name in {"repeat", "tile"}:
        times = quotient(after[dim], before[position.dim])
        return None if times is None else Moved(dim, product((times, position.outer)))
    return Moved(dim, position.outer)


def _pieces(
    name: str,
    arguments: Mapping[str, Any],
    before: Sequence[Extent],
    after: Sequence[Sequence[Extent]],
    position: Moved,
) -> list[Moved | None]:
    along = int(arguments.get("dim") or 0) % len(before)
    if name in {"select", "unbind"}:
        lost = along == position.dim
        return [
            None if lost else Moved(position.dim - (along < position.dim), position.outer)
            for _ in after
        ]
    if along != position.dim:
        return [position for _ in after]
    start = arguments.get("start") if name in {"slice", "narrow"} else 0
    first = 0 if start is None else start
    if isinstance(first, fx.Node) or (arguments.get("step") or 1) != 1:
        return [None for _ in after]
    begin: Extent = extent(first)
    pieces: list[Moved | None] = []
    for sizes in after:
        pieces.append(_rounds(before[along], begin, sizes[along], position))
        begin = begin + sizes[along]
    return pieces


def _rounds(size: Extent, begin: Extent, length: Extent, position: Moved) -> Moved | None:
    """Return the position of the batch in a piece made of whole repeats, else None."""
    if length == size:
        return position
    batch = quotient(size, position.outer)
    outer = None if batch is None else quotient(length, batch)
    if batch is None or outer is None or outer == 0 or quotient(begin, batch) is None:
        return None
    return Moved(position.dim, outer)
