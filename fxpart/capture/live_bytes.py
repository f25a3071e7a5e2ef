"""`LiveBytes`: bytes of live tensors on each logical device while a model runs.

A storage counts on the logical device that is computing when an operator allocates it, until its
last tensor is freed. So logical devices that share a processor are counted separately.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "storage_sizes"]


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors, by storage address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {int(storage._cdata): int(storage.nbytes()) for storage in storages}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the bytes of live storages on each logical device.

    Temporary tensors count if torch decomposes the operator into others; memory that a kernel
    allocates internally does not.
    """

    def __init__(self, resident: Sequence[Mapping[int, int]]) -> None:
        """Start with the storages that stay allocated throughout.

        Args:
            resident: for each device, the `storage_sizes` of its weights and of the inputs read
                there. The caller keeps their tensors alive.

        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._resident = {address for sizes in resident for address in sizes}
        self._live = [sum(sizes.values()) for sizes in resident]
        self._peak = list(self._live)
        self._device = 0
        self._paused = False
        # Weak references hold the callbacks of live storages.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak live bytes on each device since the start, or since `forget_peak`."""
        return tuple(self._peak)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Current live bytes on each device."""
        return tuple(self._live)

    def forget_peak(self) -> None:
        """Reset the peak to the current live bytes."""
        self._peak = list(self._live)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Count storages allocated inside the block on logical device `device`."""
        previous_device, self._device = self._device, device
        try:
            yield
        finally:
            self._device = previous_device

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore storages allocated inside the block."""
        was_paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was_paused

    def move_to(self, device: int) -> None:
        """Count storages allocated from now on for logical device `device`."""
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                # A sparse tensor stores its data in two dense ones.
                parts = (leaf._indices(), leaf._values()) if leaf.is_sparse else (leaf,)
                for part in parts:
                    self._count(part.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, unless it is already counted."""
        address, device, size = int(storage._cdata), self._device, int(storage.nbytes())
        if address in self._alive or address in self._resident:
            return

        def freed(_: object) -> None:
            del self._alive[address]
            self._live[device] -= size

        self._alive[address] = weakref.ref(storage, freed)
        self._live[device] += size
        self._peak[device] = max(self._peak[device], self._live[device])
