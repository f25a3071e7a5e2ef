"""From an answer about the batch to a placement of `torch.distributed.tensor`.

The public functions of today's ``torch.distributed.tensor`` (`distribute_tensor`,
`DTensor.from_local`) take a mesh and a sequence of placements; what carries both, with shape and
dtype, is `DTensorSpec`, as it was when the analyzer was torch's. A spec is returned here, because
``spec.mesh`` and ``spec.placements`` are just what those functions take.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fxpart.graph import PARTIAL

__all__ = ["PARTIAL", "REPLICATED", "act_spec", "placement"]

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
