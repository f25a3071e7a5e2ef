"""What a process has of a value when the batch is shared evenly over ``N`` processes: `Layout`."""

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fxpart.capture.batch_dim.extent import Extent
from fxpart.core.graph import PARTIAL
from fxpart.errors import FxpartError

__all__ = ["PARTIAL", "REPLICATED", "Batch", "BatchDimError", "Layout", "act_spec", "placement"]


# From an answer about the batch to a placement of `torch.distributed.tensor`.
#
# The public functions of today's ``torch.distributed.tensor`` (`distribute_tensor`,
# `DTensor.from_local`) take a mesh and a sequence of placements; what carries both, with shape and
# dtype, is `DTensorSpec`, as it was when the analyzer was torch's. A spec is returned here, because
# ``spec.mesh`` and ``spec.placements`` are just what those functions take.

REPLICATED = -1
"""Every process has all of the value."""


def placement(batch_dim: int) -> Placement:
    """Return ``Shard(batch_dim)``, or for -1 ``Replicate()`` and for -2 ``Partial()``."""
    if batch_dim == REPLICATED:
        return Replicate()
    return Partial() if batch_dim == PARTIAL else Shard(batch_dim)


def act_spec(batch_dim: int, value: object, mesh: DeviceMesh) -> DTensorSpec:
    """Return the spec of `value` on `mesh`, whose first dimension shares the batch.

    Over the other dimensions of the mesh the value is replicated. Shape, strides and dtype are
    those of the whole tensor; a value that is no tensor has none.
    """
    meta = None
    if isinstance(value, torch.Tensor):
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
    rest = [Replicate() for _ in range(mesh.ndim - 1)]
    return DTensorSpec(mesh, (placement(batch_dim), *rest), tensor_meta=meta)


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


# What is wrong with a question about the batch dimension.


class BatchDimError(FxpartError, RuntimeError):
    """A batch size, dimension, node or mesh about which nothing can be said.

    Also a ``RuntimeError``: that is what torch's analyzer raised up to version 2.2.
    """
