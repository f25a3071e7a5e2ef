"""What a process has of a value when the batch is shared evenly over ``N`` processes: `Layout`."""

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from fxpart.batch_dim.extent import Extent
from fxpart.batch_dim.placement import PARTIAL, REPLICATED

__all__ = ["Batch", "Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How what one process computes of its examples belongs to what would be computed of all.

    The parts, put in a row along `dim`, copied or added up, are ``N ** scale`` times the whole.
    A mean over the batch is partial with scale 1: the sum of the means is N times the mean. The
    gradient of a mean loss by an activation is split with scale 1: it is N times too large on each.
    """

    dim: int = REPLICATED
    """The dimension that the batch is split along; -1 replicated; -2 partial."""
    outer: Extent = 1
    """How often the batch comes round in that dimension; each process has its part of each
    round."""
    scale: int = 0
    reduction: str = "sum"
    """How parts of a partial value become the whole: ``sum``, ``max`` or ``min``."""
    differs: str = ""
    """Why the parts make up no whole: each process computes something of its own; else ``""``."""
    is_zero: bool = False
    """Whether every element is known to be 0."""

    @property
    def is_split(self) -> bool:
        """Whether each process has some of the examples."""
        return self.dim >= 0

    @property
    def is_partial(self) -> bool:
        """Whether each process has a term of the value."""
        return self.dim == PARTIAL


class Batch:
    """Which sizes are made of the batch: those that hold its symbols, or equal it by number."""

    def __init__(self, sizes: Iterable[Extent]) -> None:
        self._sizes = tuple(dict.fromkeys(sizes))
        self._seen = dict.fromkeys(self._sizes)
        self.symbols = frozenset(
            symbol
            for size in self._sizes
            if not isinstance(size, int)
            for symbol in size.free_symbols
            if isinstance(symbol, sympy.Symbol)
        )

    def is_in(self, size: Extent) -> bool:
        """Whether a dimension of that size grows with the batch."""
        if isinstance(size, int):
            return size in self._sizes
        return not self.symbols.isdisjoint(size.free_symbols)

    def see(self, size: Extent) -> None:
        """Remember the size of a dimension that the batch is in, such as all tokens."""
        self._seen[size] = None

    def was_seen(self, size: Extent) -> bool:
        """Whether a dimension of that size is made of the batch, or had the batch before."""
        return self.is_in(size) or size in self._seen

    def divides(self, size: int) -> bool:
        """Whether that many are a multiple of a batch size that is a number."""
        return any(isinstance(batch, int) and size % batch == 0 for batch in self._sizes if batch)

    def power_of(self, size: Extent) -> int | None:
        """Return p where `size` is ``batch ** p`` times something else; None for no power."""
        if isinstance(size, int):
            return 0
        half = size.subs({symbol: symbol / 2 for symbol in self.symbols}, simultaneous=True)
        ratio = sympy.cancel(size / half) if half != 0 else sympy.Integer(0)
        powers: dict[object, int] = {sympy.Integer(2) ** p: p for p in range(5)}
        return powers.get(ratio)
