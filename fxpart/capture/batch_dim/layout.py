"""`Layout`: distribution of a value when the batch is split evenly over ``N`` processes."""

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


REPLICATED = -1
"""Every process has the whole value."""


class BatchDimError(FxpartError, RuntimeError):
    """An invalid batch size, dimension, node or mesh.

    Also a ``RuntimeError``, which torch's analyzer raised up to version 2.2.
    """


@dataclass(frozen=True, slots=True)
class Layout:
    """The relation between a value computed from some examples and the value of the whole batch.

    The parts, concatenated along `dim`, copied or summed, are ``N ** scale`` times the whole. A
    mean over the batch is partial with scale 1: the sum of the means is N times the mean. The
    gradient of a mean loss by an activation is split with scale 1: it is N times too large on each
    process.
    """

    dim: int = REPLICATED
    """The dimension along which the batch is split; -1 replicated; -2 partial."""
    outer: Extent = 1
    """Number of repeats of the batch in that dimension; each process has its part of each."""
    scale: int = 0
    reduction: str = "sum"
    """Reduction that combines the parts of a partial value: ``sum``, ``max`` or ``min``."""
    differs: str = ""
    """Reason why the parts do not make up the whole; empty if they do."""
    is_zero: bool = False
    """Whether every element is known to be 0."""

    @property
    def is_split(self) -> bool:
        """Whether each process has part of the examples."""
        return self.dim >= 0

    @property
    def is_partial(self) -> bool:
        """Whether each process has a term of the value."""
        return self.dim == PARTIAL


class Batch:
    """The sizes that depend on the batch: those with its symbols, or numerically equal to it."""

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
        """Return whether a dimension of that size grows with the batch."""
        if isinstance(size, int):
            return size in self._sizes
        return not self.symbols.isdisjoint(size.free_symbols)

    def see(self, size: Extent) -> None:
        """Record the size of a dimension that contains the batch, such as all tokens."""
        self._seen[size] = None

    def was_seen(self, size: Extent) -> bool:
        """Return whether a dimension of that size grows with the batch, or was recorded."""
        return self.is_in(size) or size in self._seen

    def divides(self, size: int) -> bool:
        """Return whether `size` is a multiple of a numeric batch size."""
        return any(isinstance(batch, int) and size % batch == 0 for batch in self._sizes if batch)

    def power_of(self, size: Extent) -> int | None:
        """Return p such that `size` is ``batch ** p`` times a factor, or None if there is none."""
        if isinstance(size, int):
            return 0
        half = size.subs({symbol: symbol / 2 for symbol in self.symbols}, simultaneous=True)
        ratio = sympy.cancel(size / half) if half != 0 else sympy.Integer(0)
        powers: dict[object, int] = {sympy.Integer(2) ** p: p for p in range(5)}
        return powers.get(ratio)


# Placements of `torch.distributed.tensor`.


def placement(batch_dim: int) -> Placement:
    """Return ``Shard(batch_dim)``, or for -1 ``Replicate()`` and for -2 ``Partial()``."""
    if batch_dim == REPLICATED:
        return Replicate()
    return Partial() if batch_dim == PARTIAL else Shard(batch_dim)


def act_spec(batch_dim: int, value: object, mesh: DeviceMesh) -> DTensorSpec:
    """Return the spec of `value` on `mesh`, whose first dimension splits the batch.

    Over the other dimensions of the mesh the value is replicated. Shape, strides and dtype are
    those of the whole tensor; a non-tensor value has none. ``spec.mesh`` and
    ``spec.placements`` are arguments of the current `distribute_tensor` and `DTensor.from_local`.
    """
    meta = None
    if isinstance(value, torch.Tensor):
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
    rest = [Replicate() for _ in range(mesh.ndim - 1)]
    return DTensorSpec(mesh, (placement(batch_dim), *rest), tensor_meta=meta)
