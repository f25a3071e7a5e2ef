"""Bytes of live tensors on each logical device while a model is really run.

Every storage that an operator makes belongs to the device that is computing when it is made, until
the last tensor in it is gone. So logical devices that share one processor are still told apart.
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
    """Return the bytes of every storage that the tensors lie in, by its number; each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {int(storage._cdata): int(storage.nbytes()) for storage in storages}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, the bytes of storages that are alive on each logical device.

    What an operator needs and gives back while it runs counts where torch computes it by further
    operators; what a kernel allocates for itself does not.
    """

    def __init__(self, resident: Sequence[Mapping[int, int]]) -> None:
        """Start with what lies on the devices throughout.

        Args:
            resident: for each device, bytes by number of the storages of its weights and of the
                inputs that are read there. The caller keeps their tensors alive.

        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._not_counted = {number for sizes in resident for number in sizes}
        self._live = [sum(sizes.values()) for sizes in resident]
        self._peak = list(self._live)
        self._device = 0
        self._paused = False
        # Keeps the callbacks of storages that are alive.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes alive on each device at any time, or since `forget_peak`."""
        return tuple(self._peak)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """The bytes that are alive on each device now."""
        return tuple(self._live)

    def forget_peak(self) -> None:
        """Let the peak be what is alive now, and grow from there."""
        self._peak = list(self._live)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Count what is made inside as made on logical device `device`."""
        before, self._device = self._device, device
        try:
            yield
        finally:
            self._device = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def move_to(self, device: int) -> None:
        """Count what is made from now on as made on logical device `device`."""
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
                for part in _parts(leaf):
                    self._see(part.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        number, device, size = int(storage._cdata), self._device, int(storage.nbytes())
        if number in self._alive or number in self._not_counted:
            return

        def gone(_: object) -> None:
            del self._alive[number]
            self._live[device] -= size

        self._alive[number] = weakref.ref(storage, gone)
        self._live[device] += size
        self._peak[device] = max(self._peak[device], self._live[device])


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that have the memory: of a sparse one, its places and values."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
