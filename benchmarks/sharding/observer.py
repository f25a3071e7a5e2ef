"""`Observer`: live bytes and collectives of a process while a model runs on DTensors."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxpart.capture.live_bytes import LiveBytes, storage_sizes

__all__ = ["Observer", "local_parts"]

_SETTLING_S = 0.01
"""Wait after a collective: a thread of gloo frees its tensors slightly later."""
_KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""Kind of collective by the name of an operator of ``c10d`` or ``_c10d_functional``."""


def local_parts(tensors: Any) -> list[Tensor]:  # noqa: ANN401 - any tree
    """Return the tensors of a tree, with the local part of each DTensor."""
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in leaves]


class Observer(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes of this process, and its collectives with the bytes of their inputs.

    Calls on DTensors are counted as calls on their local parts.
    """

    def __init__(self, resident: Any) -> None:  # noqa: ANN401 - any tree of tensors
        """Start with the tensors that stay alive throughout."""
        super().__init__([storage_sizes(local_parts(resident))])
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Count one call."""
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        kind = _KINDS.get(name.partition(".")[0]) if "c10d" in namespace else None
        if kind is not None:
            # The ``_base_`` operators take their output first, then the input.
            inputs = tree_leaves(args[1]) if name.endswith("_base_") else tree_leaves(args[0])
            self.collectives.append((kind, sum(t.nbytes for t in inputs if isinstance(t, Tensor))))
        result = func(*args, **(kwargs or {}))
        if "c10d" in namespace or namespace == "fsdp":
            time.sleep(_SETTLING_S)  # gloo does not signal when it frees them
        # Memory seen only as an operand is gloo's own, which copies what it scatters.
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor]
        known = {leaf.untyped_storage()._cdata for leaf in operands}
        for leaf in tree_leaves(result):
            # A wrapper, such as a pending result, has no memory.
            if type(leaf) is Tensor and leaf.untyped_storage()._cdata not in known:
                self._count(leaf.untyped_storage())
        return result

    def resized(self, storage: torch.UntypedStorage, before_bytes: int) -> None:
        """Count a storage that was resized in place, such as an empty one of FSDP."""
        self._resident.add(int(storage._cdata))  # counted here, not as the result of a view of it
        self._live[0] += int(storage.nbytes()) - before_bytes
        self._peak[0] = max(self._peak[0], self._live[0])
