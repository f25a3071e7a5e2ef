"""Lifetimes of tensors in the backward of a user's `torch.autograd.Function`, which is Python.

A formula of autograd itself frees a value that it computes after its last reader. A backward
written in Python keeps it until a local variable is rebound or the function returns, and what a
graph of its own (`torch.enable_grad`) saves until that is differentiated.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key

__all__ = ["PythonBackwards"]


class PythonBackwards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the last node traced while a tensor made by a Function's backward is held.

    Other calls than those between `begin` and `end` are not watched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: dict[fx.Node, fx.Node] = {}
        """The last node traced during the lifetime of a watched node's result, at least itself."""
        self._watching = False
        self._held: list[tuple[weakref.ref[Tensor], fx.Node, int]] = []
        """Tensors, the nodes that allocated their storages, and these storages' addresses."""

    def begin(self) -> None:
        """Watch the tensors of a backward that starts."""
        self._watching = True

    def end(self) -> None:
        """Stop watching; the results of the backward belong to autograd."""
        self._watching = False
        self._held.clear()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        mode = get_proxy_mode()
        if self._watching and mode is not None:
            self._held = [held for held in self._held if held[0]() is not None]
            latest = next(iter(reversed(mode.tracer.graph.nodes)))
            self.last.update((node, latest) for _, node, _ in self._held)
            for leaf in tree_leaves(result):
                slot = get_proxy_slot(leaf, mode.tracer, None) if isinstance(leaf, Tensor) else None
                if slot is not None:
                    storage = storage_key(leaf)
                    # A view holds the storage that another node allocated.
                    owners = (node for _, node, address in self._held if address == storage)
                    owner = next(owners, slot.proxy.node)
                    self._held.append((weakref.ref(leaf), owner, storage))
                    self.last.setdefault(slot.proxy.node, slot.proxy.node)
        return result
