"""`affine_dims`: find the input dimensions that grow with a symbol, by comparing shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpart.errors import CaptureError, SpecError

__all__ = ["SymbolicDim", "affine_dims"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SymbolicDim:
    """A dimension of an input, of length ``factor * symbol + offset``."""

    leaf: int
    """Index of the input among all flat inputs, positional ones first."""
    dim: int
    symbol: str
    factor: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        """Refuse a factor below 1 and negative indices."""
        if self.factor < 1 or self.leaf < 0 or self.dim < 0:
            raise SpecError(
                f"dimension {self.dim} of input {self.leaf} is {self.factor} * {self.symbol} +"
                f" {self.offset}; give places from 0 and a factor of 1 or more"
            )


def affine_dims(
    symbol: str, shapes_at: Mapping[int, Sequence[Shape | None]]
) -> tuple[SymbolicDim, ...]:
    """Return the dimensions that grow with `symbol`, from shapes at three or more values.

    Args:
        symbol: name of the symbol.
        shapes_at: by value, the shape of each flat input; None for a non-tensor.

    Raises:
        CaptureError: if a dimension is not a multiple of the symbol plus a constant, or the number
            or ranks of inputs depend on the symbol.

    """
    (low, *_), (middle, *_) = (list(shapes_at)[i:] for i in (0, 1))
    first, second = shapes_at[low], shapes_at[middle]
    dims: list[SymbolicDim] = []
    for value, shapes in shapes_at.items():
        if [_rank(shape) for shape in shapes] != [_rank(shape) for shape in first]:
            raise CaptureError(
                f"the inputs at {symbol}={value} differ from those at {symbol}={low} in number or "
                "rank; set capture.symbolic=none"
            )
    for leaf, shape in enumerate(first):
        for dim, size in enumerate(shape or ()):
            lengths = {value: (shapes[leaf] or ())[dim] for value, shapes in shapes_at.items()}
            if len(set(lengths.values())) == 1:
                continue
            grown = (second[leaf] or ())[dim] - size
            factor, remainder = divmod(grown, middle - low)
            offset = size - factor * low
            if remainder or factor < 1 or any(lengths[v] != factor * v + offset for v in lengths):
                raise CaptureError(
                    f"dimension {dim} of input {leaf} is {', '.join(map(str, lengths.values()))} "
                    f"long at {symbol}={', '.join(map(str, lengths))}, which is not a multiple of "
                    "it plus a constant; set capture.symbolic=none"
                )
            dims.append(SymbolicDim(leaf, dim, symbol, factor, offset))
    return tuple(dims)


def _rank(shape: Shape | None) -> int | None:
    return None if shape is None else len(shape)
